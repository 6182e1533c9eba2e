"""Content-addressed, tiered, crash-safe store of chunks, which outlive requests, processes and machines."""

import importlib.util

from ..errors import StorePlatformError

if importlib.util.find_spec("fcntl") is None:  # checked before the imports below fail
    raise StorePlatformError("store: got a system without `fcntl`; expected a POSIX system, such as Linux or macOS")

from ..cache import chunk_id as chunk_id
from ..cache import encoder_id as encoder_id
from .disk.budget import Budget as Budget
from .fetch import Fetched as Fetched
from .fetch import Miss as Miss
from .fetch import Request as Request
from .fetch import fetch as fetch
from .format.naming import ENCODINGS as ENCODINGS
from .format.naming import PatchKey as PatchKey
from .key_rotation import RotationReport as RotationReport
from .key_rotation import rotate_key as rotate_key
from .libraries.dynamic import DynamicLibrary as DynamicLibrary
from .libraries.dynamic import HeldReference as HeldReference
from .libraries.entries import LibraryEntry as LibraryEntry
from .libraries.entries import Resource as Resource
from .libraries.references import Reference as Reference
from .libraries.references import escape as escape
from .libraries.references import parse_prompt as parse_prompt
from .libraries.retriever import ExactRetriever as ExactRetriever
from .libraries.retriever import Retriever as Retriever
from .libraries.retriever import pooled as pooled
from .libraries.static import StaticLibrary as StaticLibrary
from .linker import LinkedChunk as LinkedChunk
from .linker import LinkedPrompt as LinkedPrompt
from .linker import Linker as Linker
from .metrics import Statistics as Statistics
from .metrics import StatisticsCollector as StatisticsCollector
from .metrics import prometheus_text as prometheus_text
from .remotes.adapter import ABSENT as ABSENT
from .remotes.adapter import ANY as ANY
from .remotes.adapter import RemoteAdapter as RemoteAdapter
from .remotes.adapter import RemoteValue as RemoteValue
from .remotes.leases import Lease as Lease
from .remotes.local_adapter import LocalAdapter as LocalAdapter
from .remotes.remote_store import RemoteStore as RemoteStore
from .remotes.retry_policy import RetryPolicy as RetryPolicy
from .remotes.tensorstore_adapter import KeyValueStore as KeyValueStore
from .remotes.tensorstore_adapter import TensorStoreAdapter as TensorStoreAdapter
from .remotes.urls import open_remote as open_remote
from .remotes.valkey_adapter import ValkeyAdapter as ValkeyAdapter
from .snapshots.array_entries import ArrayContents as ArrayContents
from .snapshots.manifest import Summary as Summary
from .snapshots.orbax_item import StoreItem as StoreItem
from .snapshots.orbax_item import make_durable as make_durable
from .snapshots.restore import load_snapshot as load_snapshot
from .snapshots.save import save_snapshot as save_snapshot
from .store import ChunkStore as ChunkStore
from .tenants import DeletionReport as DeletionReport
from .tiers.device_placement import LayerStream as LayerStream
from .tiers.shared_host_tier import SharedHostTier as SharedHostTier
