"""Arguments of a session: its options, checks, and what a chat template contributes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from ..backbone import Backbone
from ..cache import Text, check_text
from ..core import KVEncoding
from ..errors import CertificateError, PoolError, RankError, SessionError
from ..patching import GROUPS, Rank
from ..plan import Certificate, DeviceCosts, Goal
from ..utils.sizes import Size, size_of
from ..window import CANONICALS, CanonicalEncoding, PatchFormer, PatchStore, encoding_choice
from .argument_checks import check_rank, float_dtype
from .runtime import PAGE_SIZE, PREFILLS, RANK, PrivateRuntime, Runtime

LARGEST_IMAGE = 64 << 20
"""Bytes of an image, as a file and as pixels."""
LARGEST_TEXT = 1 << 15
"""Tokens of a text. Attention over many more takes minutes and gigabytes, so that a caller has to ask for it."""
MEMORY = 512 << 20
"""Bytes of tokens and pixels that a session keeps of evicted chunks."""


Keep = int | tuple[int, int] | None
"""The chunks that stay after the lead: a number, or the lowest and the highest. None: all."""


@dataclasses.dataclass(frozen=True)
class SessionConfig:
    """Options of a session, which its forks share.

    Attributes:
      certificate: the measured loss of each reuse method on this backbone. With one, a returning chunk is served by a
        stored patch where that keeps to the goal. Without one, it is prefilled, unless a prefill behind the very same
        pieces is stored.
      goal: bounds on the loss of an answer, or on bytes or seconds. None: 0.05 nats with a certificate, otherwise
        exactly what the window promises.
      costs: of this device, for plans. None: assumed.
      uncertified: serve stored patches that were formed for the very same antecedent, without a certificate. Such
        chunks are "approximate", and their loss is unknown.
      linker: a `Linker`, which resolves `IMAGE#NAME` in questions to a chunk of a library.
      retriever: finds chunks while an answer is decoded; see `Session.ask`.
      around: the texts before and after every question.
      chat: lay out the whole window as one user message of the checkpoint's chat template. The text before the first
        image becomes the lead, with a `lead` that is a text as the system prompt; the rest surrounds every question.
        True, or names that the template knows with their values, such as {"enable_thinking": False}.
      placeholder: a short text that takes the place of a chunk that `keep` makes leave. The texts around it then stay,
        and what follows it is prefilled again, so that it has seen the placeholder. None: nothing takes its place, and
        texts leave with the chunks that they follow.
      largest_image: bytes that an image may have, as a file and as pixels: a number, or a text such as "64 MiB".
      largest_text: tokens that a text or a question may have.
      memory: bytes of tokens and pixels to keep of evicted chunks, so that `recall` works by name. The oldest are
        discarded first.
      rank: of the patches that are formed in the background; 0 forms none. None: 16 where the session may serve them,
        otherwise none.
      prefills: bytes of prefills that the session may add to its store, as they are. Behind the very same pieces a
        chunk is served by one without a forward, bit for bit. 0 stores none.
      encoding: of the canonicals that the session keeps, and forms and serves its patches on: a `KVEncoding` or its
        word, such as "k8v8". None: as they were prefilled, or the store's default where that is in few bits. "auto": by
        `canonicals`. Not with a certificate, whose bounds were measured on canonicals as they were prefilled. Exact
        data is never encoded: prefills, and chunks at the front of a window.
      canonicals: with "auto", the bytes of canonicals that are kept as they were prefilled; as many again are kept in
        k8v8gall, and all later ones in k5v5gall. What the store had before is not counted.
      pages, page_size, dtype: of the pool; see `PrivateRuntime`.

    Raises:
      SessionError: an option of another kind or out of range. RankError, PoolError, DtypeError: an invalid rank, number
      of pages or dtype.
    """

    certificate: Certificate | None = None
    goal: Goal | None = None
    costs: DeviceCosts | None = None
    uncertified: bool = False
    linker: Any = None
    retriever: Any = None
    around: tuple[str, str] = ("", "")
    chat: bool | Mapping[str, Any] = False
    placeholder: str | None = None
    largest_image: Size = LARGEST_IMAGE
    largest_text: int = LARGEST_TEXT
    memory: Size = MEMORY
    rank: Rank | None = None
    prefills: Size = PREFILLS
    encoding: KVEncoding | str | None = None
    canonicals: Size = CANONICALS
    pages: int | None = None
    page_size: int = PAGE_SIZE
    dtype: jax.typing.DTypeLike | None = None

    def __post_init__(self) -> None:
        for name, kind, expected in (
            ("certificate", Certificate, "Certificate.read(...), or None"),
            ("goal", Goal, "a kvpatch_jax.plan.Goal, or None"),
            ("costs", DeviceCosts, "DeviceCosts.read(...), or None"),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise SessionError(f"session.{name}: got {value!r:.80}; expected {expected}")

        if self.retriever is not None and not callable(self.retriever) and not hasattr(self.retriever, "search"):
            raise SessionError(
                f"session.retriever: got {self.retriever!r:.80}; expected a function, an object with `search`, or None"
            )

        pair = isinstance(self.around, tuple | list) and len(self.around) == 2
        if not pair or not all(isinstance(text, str) for text in self.around):
            raise SessionError(
                f"session.around: got {self.around!r:.80}; expected two texts, before and after questions"
            )

        if self.placeholder is not None:
            if not isinstance(self.placeholder, str) or not self.placeholder.strip():
                expected = "a text such as '[image left]', or None"
                raise SessionError(f"session.placeholder: got {self.placeholder!r:.80}; expected {expected}")
            check_text(self.placeholder, "session: placeholder")

        if not isinstance(self.largest_text, int) or isinstance(self.largest_text, bool) or self.largest_text < 1:
            raise SessionError(
                f"session.largest_text: got {self.largest_text!r:.80}; expected a number of tokens, 1 or more"
            )
        check_rank(self.rank, "session", least=0)
        pages = self.pages
        if pages is not None and (not isinstance(pages, int) or isinstance(pages, bool) or pages < 1):
            raise PoolError(f"session.pages: got {pages!r:.80}; expected a number of pages, 1 or more, or None")
        if not isinstance(self.uncertified, bool):
            raise SessionError(f"session.uncertified: got {self.uncertified!r:.80}; expected True or False")
        names = self.chat if isinstance(self.chat, Mapping) else {}
        if not isinstance(self.chat, bool | Mapping) or not all(isinstance(name, str) for name in names):
            raise SessionError(
                f"session.chat: got {self.chat!r:.80}; expected True, False, or names that the chat template "
                "knows, with their values"
            )

        # By name or as a type; equal options have equal values from here on. Frozen fields are set through `object`.
        if self.dtype is not None:
            object.__setattr__(self, "dtype", float_dtype(self.dtype, "session"))
        # Sizes may be texts such as "64 MiB". From here on they are whole numbers.
        for name in ("largest_image", "memory", "prefills", "canonicals"):
            size = size_of(getattr(self, name), f"session.{name}", refused=SessionError)
            object.__setattr__(self, name, size)

        object.__setattr__(self, "encoding", encoding_choice(self.encoding, "session.encoding", SessionError))
        if self.encoding is not None and self.certificate is not None:
            raise SessionError(
                f"session.encoding: got {self.encoding!r:.80} with a certificate; expected None, because bounds were "
                "measured on canonicals as they were prefilled"
            )

    @classmethod
    def with_options(cls, config: "SessionConfig | None", options: Mapping[str, Any]) -> "SessionConfig":
        """Returns a config, or the default, with some fields overridden.

        Raises:
          SessionError: no config, or an invalid option. TypeError: an unknown option.
        """
        if config is not None and not isinstance(config, SessionConfig):
            raise SessionError(f"session.config: got {config!r:.80}; expected a SessionConfig, or None")
        return dataclasses.replace(config or cls(), **options)

    def private_runtime(self, backbone: Backbone, store: PatchStore | None) -> PrivateRuntime:
        """Returns a new runtime for one session, with a pool of these options."""
        pages, page_size, encoding = self.pages, self.page_size, CanonicalEncoding()
        # Certified are only canonicals as they were prefilled, whatever the store's default is.
        if self.certificate is None:
            encoding = CanonicalEncoding(self.encoding, int(self.canonicals))
        pool: dict[str, Any] = {"pages": pages, "page_size": page_size, "dtype": self.dtype, "encoding": encoding}
        return PrivateRuntime(backbone, store, rank=self.rank, prefills=int(self.prefills), **pool)

    def form_for(self, former: PatchFormer | None) -> None:
        """Has a former make what a session of these options may serve; by default it makes nothing of that."""
        if former is None or (self.certificate is None and not self.uncertified):
            return
        former.form_means()
        former.form_patches(RANK)

    def check_runtime(self, runtime: Runtime) -> None:
        """Refuses an encoding that a shared runtime does not have: canonicals of all its sessions are kept alike.

        Raises:
          SessionError.
        """
        encodings = runtime.executor.encodings
        if self.encoding is not None and CanonicalEncoding(self.encoding).words != encodings:
            expected = f"one with encodings {encodings}, or None"
            raise SessionError(f"session.encoding: got {self.encoding!r:.80} beside a runtime; expected {expected}")

    def check_backbone(self, backbone: Backbone) -> None:
        """Refuses a certificate or a linker of other weights, and what the backbone does not have or read.

        Raises:
          CertificateError, SessionError: any of them. What the backbone raises of a text.
        """
        fingerprint = backbone.fingerprint
        if isinstance(self.rank, Mapping):
            channels = [channel.name for channel in backbone.layout.channels]
            channels += GROUPS if backbone.layout.parts else ()
            strangers = [name for name in self.rank if name not in channels]
            if strangers:
                expected = f"channels among {channels}"
                raise RankError(f"session: got a rank of channel {strangers[0]!r:.80}; expected {expected}")
        if self.placeholder is not None:
            tokens = backbone.prepare([Text(self.placeholder)])["input_ids"].shape[1]
            if not 1 <= tokens <= self.largest_text:
                found = f"{self.placeholder!r:.80}, which is {tokens} tokens"
                raise SessionError(f"session.placeholder: got {found}; expected 1 to {self.largest_text}")

        certificate = self.certificate
        if certificate is not None and certificate.backbone != fingerprint:
            raise CertificateError(
                f"session.certificate: got one of {certificate.model!r:.80}, backbone "
                f"{certificate.backbone[:16]!r}; expected backbone {fingerprint[:16]!r}"
            )
        if self.linker is not None:
            found = getattr(self.linker, "backbone", None)
            if found != fingerprint:
                shown = self.linker if found is None else f"a linker of backbone {found[:16]}"
                raise SessionError(f"session.linker: got {shown!r:.80}; expected backbone {fingerprint[:16]!r}")


def check_arguments(backbone: Any, store: Any, keep: Any, runtime: Any, name: Any) -> None:
    """Refuses arguments that do not make a session.

    Raises:
      SessionError: an invalid one, or a runtime of another backbone or store.
    """
    if not all(hasattr(backbone, word) for word in ("fingerprint", "prepare", "embed", "prefill")):
        raise SessionError(f"session.backbone: got a {type(backbone).__name__}; expected a backbone of models.load")
    if store is not None and not isinstance(store, PatchStore):
        raise SessionError(f"session.store: got {store!r:.80}; expected a kvpatch_jax.ChunkStore, or None")

    check_keep(keep)
    if name is not None and (not isinstance(name, str) or not name):
        raise SessionError(f"session.name: got {name!r:.80}; expected a text, or None")

    if runtime is not None:
        if not isinstance(runtime, Runtime):
            raise SessionError(f"session.runtime: got {runtime!r:.80}; expected one of another session, or None")
        if runtime.backbone.fingerprint != backbone.fingerprint:
            found, expected = runtime.backbone.fingerprint[:16], backbone.fingerprint[:16]
            raise SessionError(f"session.runtime: got one of backbone {found!r}; expected backbone {expected!r}")
        if store is not None and runtime.store is not store:
            raise SessionError(f"session.store: got {store!r:.80} beside a runtime; expected the runtime's, or None")


def check_keep(keep: Any) -> None:
    """Raises SessionError for an invalid number of chunks to keep."""
    numbers = keep if isinstance(keep, tuple) else (keep, keep)
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    if keep is not None and not (whole and len(numbers) == 2 and 1 <= numbers[0] <= numbers[1]):
        expected = "a number of chunks, 1 or more, a pair of the lowest and the highest number, or None"
        raise SessionError(f"session.keep: got {keep!r:.80}; expected {expected}")


def with_chat_template(backbone: Any, lead: Any, config: SessionConfig) -> tuple[list[int] | None, SessionConfig]:
    """Returns what a chat template puts around a session's images, so that images stay chunks.

    Args:
      lead: the system prompt, or None for the template's own.

    Returns:
      The token ids of the lead (None: the template begins with the first image), and `config` with the texts around
      every question, in which the template's names have gone.

    Raises:
      SessionError: a lead that is no text, texts around questions, or a backbone without chat templates. What the
      backbone raises of its template.
    """
    if lead is not None and not isinstance(lead, str):
        raise SessionError(f"session.lead: got {lead!r:.80} with chat; expected a text, the system prompt, or None")

    if lead is not None:
        check_text(lead, "session: lead")
    if tuple(config.around) != ("", ""):
        raise SessionError(f"session.around: got {config.around!r:.80} with chat; expected the default")
    if not all(hasattr(backbone, name) for name in ("chat_frame", "ids")):
        raise SessionError(f"session.chat: got a {type(backbone).__name__}; expected a backbone of models.load")

    # Without a token in front of the first image, the window pins that image instead.
    names = config.chat if isinstance(config.chat, Mapping) else {}
    frame = backbone.chat_frame(None if lead is None else str(lead), **names)
    if frame.between:
        raise SessionError(
            f"session.chat: got a chat template with {len(frame.between)} tokens between two images, whose places move "
            "in a session; expected one that writes images one right behind the other (else `lead` and `around`)"
        )
    return list(frame.front) or None, dataclasses.replace(config, chat=True, around=(frame.before, frame.behind))
