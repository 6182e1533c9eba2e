"""Chunks that outlive requests, processes and machines: a content-addressed, tiered, crash-safe store."""

from .ids import ENCODINGS as ENCODINGS
from .ids import Served as Served
from .ids import chunk_id as chunk_id
from .ids import encoder_id as encoder_id
from .placement import LayerStream as LayerStream
from .remote import KeyValueStore as KeyValueStore
from .store import Budget as Budget
from .store import ChunkStore as ChunkStore
from .store import Remote as Remote
