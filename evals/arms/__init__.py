"""Arms: the methods of reuse that data sets compare. A file per kind, one signature for all (`arm.ArmMaker`).

To add an arm, write its maker in the file of its kind and list it in that file's `…_makers`.
"""

from .arm import AlternativeArm as AlternativeArm
from .arm import ArmFactory as ArmFactory
from .catalogue import arm_makers as arm_makers
from .catalogue import make_arms as make_arms
from .query_aware import QueryAwareArm as QueryAwareArm
from .query_aware import QuestionReader as QuestionReader
from .query_aware import make_query_aware as make_query_aware
from .query_aware import query_aware_names as query_aware_names
from .reused_page import KV as KV
from .reused_page import ReusedPage as ReusedPage
from .reused_page import leading as leading
