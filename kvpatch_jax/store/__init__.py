"""Chunks that outlive requests, processes and machines: a content-addressed, tiered, crash-safe store."""

from .ids import ENCODINGS as ENCODINGS
from .ids import Served as Served
from .ids import chunk_id as chunk_id
from .ids import encoder_id as encoder_id
from .placement import LayerStream as LayerStream
from .remote import KeyValueStore as KeyValueStore
from .remote import Remote as Remote
from .statistics import Statistics as Statistics
from .statistics import prometheus_text as prometheus_text
from .store import Budget as Budget
from .store import ChunkStore as ChunkStore
from .tenants import Deleted as Deleted
