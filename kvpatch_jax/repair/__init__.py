"""Methods of reuse, all of one signature: `method(backbone, splice, budget, **settings) -> Repaired`.

They work on identical KV and count what they cost: token-layers, bytes stored and moved, and FLOPs of serving.
`METHODS` lists them. Patches correct features; most others recompute tokens in context (Kamera §6, App. C.3).
"""

from .methods import METHODS as METHODS
from .patches import spliced_chunks as spliced_chunks
from .prompts import PromptPiece as PromptPiece
from .prompts import splice_prompt as splice_prompt
from .question_attention import READINGS as READINGS
from .question_attention import Reading as Reading
from .question_attention import attention_scores as attention_scores
from .question_attention import reordered_by_question as reordered_by_question
from .references import reprefill_flops as reprefill_flops
from .repair_budget import RepairBudget as RepairBudget
from .repair_budget import kv_bytes as kv_bytes
from .repaired import RepairBytes as RepairBytes
from .repaired import Repaired as Repaired
from .repaired import input_bytes as input_bytes
from .schedules import RATIOS as RATIOS
from .schedules import best_schedule as best_schedule
from .schedules import logit_error as logit_error
from .schedules import recomputed_sensitivity as recomputed_sensitivity
from .spliced_cache import OtherAntecedent as OtherAntecedent
from .spliced_cache import SplicedCache as SplicedCache
from .spliced_cache import canonical_of as canonical_of
from .spliced_cache import pooled_embedding as pooled_embedding
