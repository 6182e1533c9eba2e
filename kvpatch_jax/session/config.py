"""Options of a session, checked once, and what a chat template contributes to them."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np

from ..backbone import Backbone, check_is_backbone
from ..cache import Template, Text, check_text, encoded
from ..core import KVEncoding
from ..errors import InputError, PoolError, SessionError, ShapeError
from ..patching import GROUPS, Rank, parse_size
from ..plan import DEFAULT_KL, Certificate, Reuse
from ..utils.kinds import expect_names
from ..utils.sizes import Size, size_of
from ..window import PatchStore, encodings_of, is_count
from .runtime import Runtime

Keep = int | tuple[int, int] | None
"""The chunks that stay after the lead: a number, or the lowest and the highest. None: all."""

LARGEST_IMAGE = 64 << 20
"""Bytes of an image, as a file and as pixels."""
LARGEST_TEXT = 1 << 15
"""Tokens of a text or a question. Attention over many more takes minutes and gigabytes; add it in parts."""
MEMORY = 512 << 20
"""Bytes of tokens and pixels that a session keeps of evicted chunks."""


@dataclasses.dataclass(frozen=True)
class SessionConfig:
    """Options of a session, which its forks share.

    Attributes:
      reuse: how a chunk that comes back is served where no prefill behind the very same pieces is stored. "exact": by a
        forward. "certified": by what the certificate bounds to `kl`, at the least cost. "patched": by a patch that was
        formed behind the very same antecedent, or a stored prefill behind the same nearest chunk; its loss is unknown.
        "blind": by its canonical alone. What is not as promised is "approximate". None: "certified" with a certificate,
        else "exact".
      certificate: the measured loss of each reuse method on this backbone.
      kl: nats that an answer may lose: by its bound with "certified", on average over audits with any reuse.
      audit: share of the approximate answers that are audited once they were read to their end, after the first three;
        0: none. Where audits show a loss beyond `kl`, or beyond blind reuse's, the session warns once and from then on
        prefills that kind of chunk (`Stats.audits`).
      linker: a `Linker`, which resolves `IMAGE#NAME` in questions to a chunk of a library.
      retriever: finds chunks while an answer is decoded; see `Session.ask`.
      chat: lay out the whole window as one user message of the checkpoint's chat template. The text before the first
        image becomes the lead, with a `lead` that is a text as the system prompt; the rest surrounds every question.
        True, or names that the template knows with their values, such as {"enable_thinking": False}.
      around: the texts before and after every question, in which a control token that is spelled is one (`Template`).
      placeholder: a short text that takes the place of a chunk that `keep` makes leave. The texts around it then stay.
        None: nothing takes its place, and texts leave with the chunks that they follow.
      memory: bytes of tokens and pixels to keep of evicted chunks, so that `recall` works by name. The oldest are
        discarded first.
      rank: of the patches that are formed in the background, or their size as text, "15 %" of a chunk's KV or "12 kB";
        0 forms none. None: none where the session may not serve them, 16 with a certificate, which is of ranks, else
        "15 %".
      encoding: of the canonicals that the session keeps, and forms and serves its patches on: a `KVEncoding` or its
        word, such as "k8v8". None: as they were prefilled. Not with a certificate, whose bounds were measured on
        canonicals as they were prefilled. Exact data is never encoded: prefills, and chunks at the front of a window.
      pages: of 16 tokens, of the pool. None: it grows as needed.

    Raises:
      SessionError: an option of another kind or out of range. InputError: an invalid rank. PoolError: of pages.
    """

    reuse: Reuse | None = None
    certificate: Certificate | None = None
    kl: float | int = DEFAULT_KL
    audit: float | int = 0.02
    linker: Any = None
    retriever: Any = None
    chat: bool | Mapping[str, Any] = False
    around: tuple[str, str] = ("", "")
    placeholder: str | None = None
    memory: Size = MEMORY
    rank: Rank | str | None = None
    encoding: KVEncoding | str | None = None
    pages: int | None = None

    def __post_init__(self) -> None:
        certificate, around, chat, mark = self.certificate, self.around, self.chat, self.placeholder
        number = isinstance(self.kl, int | float) and not isinstance(self.kl, bool)
        share = isinstance(self.audit, int | float) and not isinstance(self.audit, bool)
        known = isinstance(self.reuse, str | None) and self.reuse in (None, *get_args(Reuse))
        names = chat if isinstance(chat, Mapping) else {}
        retriever = self.retriever is None or callable(self.retriever) or hasattr(self.retriever, "search")
        pair = isinstance(around, tuple | list) and len(around) == 2 and all(isinstance(text, str) for text in around)
        _refuse(
            ("certificate", certificate, isinstance(certificate, Certificate | None), "a Certificate, or None"),
            ("reuse", self.reuse, known, f"one of {get_args(Reuse)}, or None"),
            ("reuse", self.reuse, str(self.reuse) != "certified" or certificate is not None, "a certificate beside it"),
            ("kl", self.kl, number and 0 <= self.kl < 2**63, "nats, 0 or more"),
            ("audit", self.audit, share and 0 <= self.audit <= 1, "a share of the answers, 0 to 1"),
            ("retriever", self.retriever, retriever, "a function, an object with `search`, or None"),
            ("around", around, pair, "two texts, before and after questions"),
            ("chat", chat, isinstance(chat, bool | Mapping) and all(isinstance(name, str) for name in names),
             "True, False, or names that the chat template knows, with their values"),
            ("placeholder", mark, mark is None or (isinstance(mark, str) and bool(mark.strip())),
             "a text such as '[image left]', or None"),
            ("encoding", self.encoding, self.encoding is None or certificate is None,
             "None with a certificate, because bounds were measured on canonicals as they were prefilled"),
        )  # fmt: skip
        if mark is not None:
            check_text(mark, "session: placeholder")
            encoded(mark)
        check_rank(self.rank, "session", least=0)
        if self.pages is not None and not is_count(self.pages):
            raise PoolError(f"session.pages: got {self.pages!r:.80}; expected a number of pages, 1 or more, or None")

        # Equal options have equal values from here on. Frozen fields are set through `object`.
        object.__setattr__(self, "around", tuple(map(Template, around)))
        object.__setattr__(self, "memory", size_of(self.memory, "session.memory", refused=SessionError))
        try:
            object.__setattr__(self, "encoding", encodings_of(self.encoding)[0])
        except InputError as error:
            raise SessionError(f"session.encoding: {error}") from error

    @classmethod
    def with_options(
        cls, config: "SessionConfig | None", options: Mapping[str, Any], caller: str, others: Sequence[str]
    ) -> "SessionConfig":
        """Returns a config, or the default, with some fields overridden.

        Args:
          caller: begins the message of an option that is not known. others: its options that are no fields.

        Raises:
          SessionError: no config, or an invalid or unknown option.
        """
        fields = [field.name for field in dataclasses.fields(cls)]
        expect_names(options, [*others, *fields], caller, SessionError)
        if config is not None and not isinstance(config, SessionConfig):
            raise SessionError(f"session.config: got {config!r:.80}; expected a SessionConfig, or None")
        return dataclasses.replace(config or cls(), **options)

    @property
    def policy(self) -> Reuse:
        """How a chunk that comes back is served: `reuse`, or its default."""
        return self.reuse or ("exact" if self.certificate is None else "certified")

    def runtime(self, backbone: Backbone, store: PatchStore | None, **options: Any) -> Runtime:
        """Opens a runtime for one session, with a pool of these options."""
        options |= {"pages": self.pages, "rank": self.rank, "encoding": encodings_of(self.encoding)[0]}
        return Runtime(backbone, store, **options)

    def check(self, backbone: Backbone, store: Any, runtime: Runtime | None, keep: Any, name: Any) -> None:
        """Refuses arguments that do not make a session with these options.

        Raises:
          SessionError, InputError: an invalid argument, or an option that backbone, store or a shared runtime do not
          have; one of other weights. What the backbone raises of a text.
        """
        loaded = all(hasattr(backbone, word) for word in ("fingerprint", "prepare", "embed", "prefill"))
        _refuse(("backbone", backbone, loaded, "a backbone of models.load"))
        check_keep(keep)
        fingerprint, certificate = backbone.fingerprint, self.certificate
        linked = None if self.linker is None else getattr(self.linker, "backbone", self.linker)
        expected = f"one of backbone {fingerprint[:16]!r}, or None"
        _refuse(
            ("store", store, store is None or isinstance(store, PatchStore), "a kvpatch_jax.ChunkStore, or None"),
            ("name", name, name is None or (isinstance(name, str) and bool(name)), "a text, or None"),
            ("runtime", runtime, runtime is None or isinstance(runtime, Runtime), "one of another session, or None"),
            ("linker", linked, linked in (None, fingerprint), expected),
        )
        if isinstance(self.rank, Mapping):
            channels = [channel.name for channel in backbone.layout.channels]
            channels += GROUPS if backbone.layout.parts else ()
            if strangers := [channel for channel in self.rank if channel not in channels]:
                found = f"a rank of channel {strangers[0]!r:.80}"
                raise InputError(f"session: got {found}; expected channels among {channels}")
        if certificate is not None and certificate.backbone != fingerprint:
            found = f"{certificate.model!r:.80}, backbone {certificate.backbone[:16]!r}"
            raise InputError(f"session.certificate: got one of {found}; expected backbone {fingerprint[:16]!r}")
        if self.placeholder is not None:
            tokens = backbone.prepare([Text(self.placeholder)])["input_ids"].shape[1]
            _refuse(("placeholder", self.placeholder, 1 <= tokens <= LARGEST_TEXT, f"1 to {LARGEST_TEXT} tokens"))
        if runtime is not None:
            encodings = runtime.executor.sources.encodings
            same = self.encoding is None or encodings_of(self.encoding) == encodings
            _refuse(
                ("store", store, store is None or runtime.store is store, "the runtime's, or None"),
                ("encoding", self.encoding, same, f"one with encodings {encodings} beside a runtime, or None"),
                ("rank", self.rank, self.rank is None, "None beside a runtime, which has its rank"),
                ("pages", self.pages, self.pages is None, "None beside a runtime, which has its pool"),
                ("runtime", runtime, runtime.backbone.fingerprint == fingerprint, expected),
            )


def _refuse(*checks: tuple[str, Any, bool, str]) -> None:
    """Raises SessionError for the first name and value that is not valid, with what was expected."""
    for name, value, valid, expected in checks:
        if not valid:
            raise SessionError(f"session.{name}: got {value!r:.80}; expected {expected}")


def check_keep(keep: Any) -> None:
    """Raises SessionError for an invalid number of chunks to keep."""
    numbers = keep if isinstance(keep, tuple) else (keep, keep)
    valid = keep is None or (len(numbers) == 2 and all(map(is_count, numbers)) and numbers[0] <= numbers[1])
    expected = "a number of chunks, 1 or more, a pair of the lowest and the highest number, or None"
    _refuse(("keep", keep, valid, expected))


def check_backbone(backbone: Any, store: Any, caller: str) -> None:
    """Raises InputError for an invalid backbone or store. `caller` begins the message."""
    check_is_backbone(backbone, caller)
    if store is not None and not isinstance(store, PatchStore):
        raise InputError(f"{caller}: got store {store!r:.80}; expected a kvpatch_jax.ChunkStore, or None")


def float_dtype(dtype: Any, caller: str) -> np.dtype:
    """Returns a dtype by its name. Raises ShapeError for one without floating point; `caller` begins the message."""
    with contextlib.suppress(TypeError):
        if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            return jnp.dtype(dtype)
    raise ShapeError(f"{caller}: got dtype {dtype!r:.80}; expected a floating-point one, such as 'bfloat16'")


def check_rank(rank: Any, caller: str, least: int) -> None:
    """Raises InputError unless a rank is a whole number, one for each channel, or text. None is valid if 0 is."""
    if rank is None and least == 0:
        return
    if isinstance(rank, str):
        parse_size(rank, caller)
        return
    for number in rank.values() if isinstance(rank, Mapping) else [rank]:
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
            expected = f"a whole number from {least}, one for each channel, or text such as '15 %'"
            raise InputError(f"{caller}: got rank {rank!r:.80}; expected {expected}")


def with_chat_template(backbone: Any, lead: Any, config: SessionConfig) -> tuple[list[int] | None, SessionConfig]:
    """Returns what a chat template puts around a session's images, so that images stay chunks.

    Args:
      lead: the system prompt, or None for the template's own.

    Returns:
      The token ids of the lead (None: the template begins with the first image), and `config` with the texts around
      every question.

    Raises:
      SessionError: another lead, texts around questions, or a backbone without chat templates.
    """
    _refuse(
        ("lead", lead, isinstance(lead, str | None), "a text, the system prompt, or None with chat"),
        ("around", config.around, config.around == ("", ""), "the default with chat"),
        ("chat", backbone, hasattr(backbone, "chat_frame") and hasattr(backbone, "ids"), "a backbone of models.load"),
    )
    if lead is not None:
        check_text(lead, "session: lead")

    # Without a token in front of the first image, the window pins that image instead.
    names = config.chat if isinstance(config.chat, Mapping) else {}
    frame = backbone.chat_frame(None if lead is None else str(lead), **names)
    if frame.between:
        raise SessionError(
            f"session.chat: got a chat template with {len(frame.between)} tokens between two images, whose places move "
            "in a session; expected one that writes images one right behind the other (else `lead` and `around`)"
        )
    return list(frame.front) or None, dataclasses.replace(config, chat=True, around=(frame.before, frame.behind))
