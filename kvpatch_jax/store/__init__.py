"""Content-addressed, crash-safe store of chunks, which outlive requests, processes and machines."""

import importlib.util

if importlib.util.find_spec("fcntl") is None:  # checked before the imports below fail
    # An AttributeError of the package too: `hasattr` returns False there, and `help` omits the store.
    raise AttributeError("store: got a system without `fcntl`; expected a POSIX system, such as Linux or macOS")

from ..cache import chunk_id as chunk_id
from .fetch import Fetched as Fetched
from .fetch import Miss as Miss
from .fetch import Request as Request
from .fetch import fetch as fetch
from .libraries import DynamicLibrary as DynamicLibrary
from .libraries import HeldReference as HeldReference
from .libraries import LibraryEntry as LibraryEntry
from .libraries import Resource as Resource
from .libraries import StaticLibrary as StaticLibrary
from .linker import LinkedChunk as LinkedChunk
from .linker import LinkedPrompt as LinkedPrompt
from .linker import Linker as Linker
from .metrics import StoreCollector as StoreCollector
from .names import PatchKey as PatchKey
from .objects import Usage as Usage
from .orbax_item import StoreItem as StoreItem
from .orbax_item import make_durable as make_durable
from .references import Reference as Reference
from .references import escape as escape
from .references import parse_prompt as parse_prompt
from .remote import Lease as Lease
from .remote import Remote as Remote
from .remote import open_remote as open_remote
from .retriever import ExactRetriever as ExactRetriever
from .retriever import Retriever as Retriever
from .retriever import pooled as pooled
from .snapshot import Summary as Summary
from .store import ChunkStore as ChunkStore
from .store import Statistics as Statistics
