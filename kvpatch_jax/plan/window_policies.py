"""Ways of keeping an agent's window small, what each of them costs a step, and which is the cheapest within a goal.

A loop adds one chunk a step. It may let the oldest chunk leave each time, or let many leave together behind a prefix
cache; what stays is rotated, or prefilled again; texts leave with their chunks, or a placeholder takes the place of a
chunk and they stay. All are priced by the edits that windows and plans return: bytes and FLOPs of `Costs`, seconds of
`DeviceCosts`. There is no second cost model, so the classic ways win where they are cheaper.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, Literal

from ..errors import CertificateError, PlanError
from ..window import LIMIT, SURVIVOR_WAYS, Costs, Edit, Prefill, Promise, Recompute, Rotate, composing_edits
from .device_costs import DeviceCosts
from .goal import Goal
from .online_certificate import AnyCertificate
from .option_solver import CertifiedBounds

STEPS = 128
"""Steps over which a window that grows is priced."""


@dataclasses.dataclass(frozen=True)
class LoopSizes:
    """Sizes of an agent's loop, in tokens. Each step adds a chunk, asks a question, and adds a text.

    Attributes:
      chunk: of the chunk.
      text: of the text that follows it and is in the window from then on, such as the agent's action. 0: none.
      lead: of what is pinned at the front.
      asked, answered: of the question and its answer, which do not stay. The question's forward gives the answer's
        first token.
      placeholder: of the text that takes the place of a chunk. None: no policy with placeholders is compared.
      span: positions that the chunk takes, as in `Entry`. None: as many as it has tokens.
      modality: of the chunk, for certificates.
      steps: of the loop. A window that grows is priced over all of them.
      limit: the largest number of tokens of the window, question and answer included. None: no limit.

    Raises:
      PlanError: a number that is out of range.
    """

    chunk: int
    text: int = 0
    lead: int = 0
    asked: int = 0
    answered: int = 0
    placeholder: int | None = None
    span: int | None = None
    modality: str = "image"
    steps: int = STEPS
    limit: int | None = None

    def __post_init__(self) -> None:
        least = {"chunk": 1, "text": 0, "lead": 0, "asked": 0, "answered": 0, "steps": 1}
        for name in ("placeholder", "span", "limit"):
            if getattr(self, name) is not None:
                least[name] = 1
        for name, bound in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not bound <= value < LIMIT:
                raise PlanError(f"loop.{name}: got {value!r:.80}; expected a whole number from {bound} to 2**30")
        if self.answered and not self.asked:
            raise PlanError(f"loop.answered: got {self.answered} without a question; expected asked=1 or more")


@dataclasses.dataclass(frozen=True)
class EvictionPolicy:
    """Way of keeping a window.

    Attributes:
      low, high: once there would be more than `high` chunks after the lead, the oldest leave together, and `low` stay,
        the new one included. Equal numbers: one leaves at each step. `high` None: nothing leaves.
      survivors: what stays behind the first chunk that leaves is "rotated" and remembers it, or "prefilled" again.
      placeholder: a text takes the place of each chunk that leaves, and the texts around it stay. Otherwise texts leave
        with the chunks that they follow.

    Raises:
      PlanError: invalid numbers, or survivors that are rotated behind a placeholder, which they have not seen.
    """

    low: int
    high: int | None
    survivors: Literal["rotated", "prefilled"] = "prefilled"
    placeholder: bool = False

    def __post_init__(self) -> None:
        _check_numbers(self.low, self.low if self.high is None else self.high)
        if self.survivors not in ("rotated", "prefilled"):
            raise PlanError(f"policy.survivors: got {self.survivors!r:.80}; expected 'rotated' or 'prefilled'")
        if self.placeholder and self.survivors == "rotated":
            raise PlanError("policy.survivors: got 'rotated' with a placeholder; expected 'prefilled', to have seen it")

    @property
    def cycle(self) -> int:
        """Steps after which the number of chunks returns; 1 where nothing leaves."""
        return 1 if self.high is None else self.high - self.low + 1

    @property
    def grows(self) -> bool:
        """Whether the window grows without end, because texts stay."""
        return self.high is None or self.placeholder

    @property
    def name(self) -> str:
        """Its name, with the numbers of chunks."""
        if self.high is None:
            return "never evict"
        batched = self.high > self.low
        if self.placeholder:
            word = "batched placeholders" if batched else "placeholder"
        elif self.survivors == "prefilled":
            word = "batched eviction" if batched else "slide, re-prefilled"
        else:
            word = "batched slide" if batched else "slide"
        return f"{word}, {self.low} to {self.high}" if batched else f"{word}, {self.low}"


@dataclasses.dataclass(frozen=True)
class PolicyPrice:
    """Price of a policy, and its bounds against the window's promise.

    Attributes:
      policy: what is priced.
      steps: how many steps are summed: one cycle, or where the window grows all steps of the loop, in whole cycles.
      bytes, flops: of all these steps, questions and answers included, exactly.
      seconds: of all these steps, predicted.
      worst_bytes, worst_seconds: of the most expensive step.
      tokens: most tokens that an answer reads: window, question and answer.
      kl, flips: as of `Plan`: 0 if the window is as promised; None if nothing bounds the loss.
      beyond: how the window exceeds everything the certificate was measured on; or None.
    """

    policy: EvictionPolicy
    steps: int
    bytes: int
    flops: int
    seconds: float
    worst_bytes: int
    worst_seconds: float
    tokens: int
    kl: float | None
    flips: float | None
    beyond: str | None = None

    @property
    def step_flops(self) -> float:
        """FLOPs of a step, the mean."""
        return self.flops / self.steps

    @property
    def step_bytes(self) -> float:
        """Bytes of a step, the mean."""
        return self.bytes / self.steps

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step, the mean."""
        return self.seconds / self.steps

    def __str__(self) -> str:
        kl = "not bounded" if self.kl is None else f"≤ {self.kl:.3g}" if self.kl else "0"
        costs = f"{self.step_flops:.3g} FLOPs, {self.step_bytes:.3g} bytes, {self.step_seconds:.3g} s a step"
        return f"{self.policy.name}: {costs} (at most {self.worst_seconds:.3g} s), {self.tokens} tokens, KL {kl}"


@dataclasses.dataclass(frozen=True)
class PolicyComparison:
    """Prices of the policies that keep a window within bounds.

    Attributes:
      sizes, promise, goal: as they were asked for.
      devices: the rates that seconds were predicted with.
      prices: the quickest first.
      reasons: for each price, why it does not meet the goal; None where it does.
    """

    sizes: LoopSizes
    promise: Promise
    goal: Goal
    devices: DeviceCosts
    prices: tuple[PolicyPrice, ...]
    reasons: tuple[str | None, ...]

    @functools.cached_property
    def cheapest(self) -> PolicyPrice:
        """The quickest policy that meets the goal.

        Raises:
          PlanError: none does.
        """
        for price, reason in zip(self.prices, self.reasons, strict=True):
            if reason is None:
                return price
        raise PlanError(f"policies: got goal {self.goal}; expected one that a policy meets:\n{self._lines()}")

    def explain(self) -> str:
        """Describes the choice: a line for the cheapest policy, then one for each other with the reason against it.

        Raises:
          PlanError: no policy meets the goal.
        """
        rates = f"{'measured' if self.devices.measured else 'assumed'} on {self.devices.device}"
        return f"{self.cheapest}; goal {self.goal}, {self.promise}, {rates}\n{self._lines(self.cheapest)}".rstrip()

    def _lines(self, chosen: PolicyPrice | None = None) -> str:
        lines = []
        for price, reason in zip(self.prices, self.reasons, strict=True):
            if price is not chosen:
                slower = f"{price.seconds / price.steps / chosen.step_seconds:.2f} times the seconds" if chosen else ""
                lines.append(f"  not {price}: {reason or slower}")
        return "\n".join(lines)


def price_policy(
    policy: EvictionPolicy,
    sizes: LoopSizes,
    *,
    costs: Costs,
    devices: DeviceCosts | None = None,
    promise: Promise = "remember",
    certificate: AnyCertificate | None = None,
) -> PolicyPrice:
    """Prices a policy over steps that begin with the lead and `low` chunks, each with its text.

    A window that does not grow is priced over one cycle, which is its steady state.

    Args:
      costs: of the backbone, such as `Costs.of(backbone)`.
      devices: None: assumed rates of this device.
      promise: what the window is compared with. Survivors that are rotated are as promised under "remember"; under
        "forget" the certificate's row "survivor" bounds them.

    Raises:
      PlanError: an argument of another type, or a policy with placeholders for sizes without one.
      CertificateError: a certificate of another backbone.
    """
    _check_arguments(sizes, costs, devices, promise, certificate)
    if not isinstance(policy, EvictionPolicy):
        raise PlanError(f"policies.policy: got {policy!r:.80}; expected an EvictionPolicy")
    if policy.placeholder and sizes.placeholder is None:
        raise PlanError(f"loop.placeholder: got None for {policy.name!r}; expected its number of tokens")

    devices = devices or DeviceCosts.assumed()
    steps = -(-sizes.steps // policy.cycle) * policy.cycle if policy.grows else policy.cycle
    nbytes, flops, seconds, tokens = [], [], [], 0
    for edits, read in itertools.islice(_steps(policy, sizes, costs), steps):
        nbytes.append(sum(edit.bytes for edit in edits))
        flops.append(sum(edit.flops for edit in edits))
        seconds.append(devices.seconds(edits))
        tokens = max(tokens, read)

    kl, flips, beyond = _bounds(policy, sizes, promise, certificate)
    total = sum(nbytes), sum(flops), sum(seconds)
    return PolicyPrice(policy, steps, *total, max(nbytes), max(seconds), tokens, kl, flips, beyond)


def compare_policies(
    sizes: LoopSizes,
    low: int,
    high: int,
    *,
    costs: Costs,
    devices: DeviceCosts | None = None,
    promise: Promise = "remember",
    goal: Goal | None = None,
    certificate: AnyCertificate | None = None,
    uncertified: bool = False,
    keep_text: bool = False,
    never: bool = True,
) -> PolicyComparison:
    """Prices every way of keeping a window that shows at least `low` and at most `high` chunks.

    Of each kind in batches, the number at which chunks leave is the best one up to `high`: a smaller one prefills more
    often, a larger one reads more.

    Args:
      costs, devices, promise, certificate: as of `price_policy`.
      goal: a bound on KL or flips; bytes and seconds are those of the most expensive step. None: as promised.
      uncertified: also takes survivors that nothing bounds, if the goal bounds neither KL nor flips.
      keep_text: whether texts between chunks must stay, which sliding and evicting do not let them.
      never: whether to compare with a window that nothing leaves, whatever `high` is.

    Raises:
      PlanError: an invalid argument. CertificateError: a certificate of another backbone.
    """
    goal = Goal() if goal is None else goal
    _check_numbers(low, high)
    if not isinstance(goal, Goal):
        raise PlanError(f"policies.goal: got {goal!r:.80}; expected a Goal, or None")
    _check_arguments(sizes, costs, devices, promise, certificate)

    devices = devices or DeviceCosts.assumed()
    options: dict[str, Any] = {"costs": costs, "devices": devices, "promise": promise, "certificate": certificate}
    priced = list[tuple[str | None, PolicyPrice]]()
    kinds: list[dict[str, Any]] = [{"survivors": "rotated"}]
    if low > 1:
        kinds.append({"survivors": "prefilled"})
    if sizes.placeholder is not None:
        kinds.append({"placeholder": True})
    for kind in kinds:
        one_by_one = [EvictionPolicy(low, low, **kind)]
        batched = [EvictionPolicy(low, number, **kind) for number in range(low + 1, high + 1)]
        for group in (one_by_one, batched):
            prices = [price_policy(policy, sizes, **options) for policy in group]
            judged = [(_reason_against(price, goal, sizes, keep_text, uncertified), price) for price in prices]
            # Those that meet the goal go before those that do not.
            if judged:
                priced.append(min(judged, key=lambda pair: (pair[0] is not None, pair[1].step_seconds)))

    if never:
        price = price_policy(EvictionPolicy(low, None), sizes, **options)
        priced.append((_reason_against(price, goal, sizes, keep_text, uncertified), price))

    priced.sort(key=lambda pair: pair[1].step_seconds)
    prices, reasons = tuple(price for _, price in priced), tuple(reason for reason, _ in priced)
    return PolicyComparison(sizes, promise, goal, devices, prices, reasons)


# ---------------------------------------------------------------------------------------------------------- inside


def _steps(policy: EvictionPolicy, sizes: LoopSizes, costs: Costs) -> Iterator[tuple[list[Edit], int]]:
    """Yields the edits of each step and the tokens that its answer reads, without end.

    The edits are those of a session: of the chunk, with what leaves for it; of the question; of the text.
    """
    # All chunks are alike, so a window is the tokens and pieces in front of its first chunk, and how many chunks there
    # are.
    front, ahead, chunks = sizes.lead, int(sizes.lead > 0), policy.low
    chunk, text, placeholder = sizes.chunk, sizes.text, sizes.placeholder or 0
    moves = not policy.placeholder or placeholder != (sizes.span or chunk)
    shown = 1 + bool(text)

    while True:
        rotations, forwards, behind, count = list[Edit](), list[Edit](), front, ahead
        if policy.high is not None and chunks + 1 > policy.high:
            leaving = chunks + 1 - policy.low
            chunks -= leaving

            # What follows the first chunk that leaves: placeholders and the texts between them, and all that stays.
            pieces = [(chunk, False), (text, False)] * chunks
            if policy.placeholder:
                pieces = [(placeholder, True), (text, False)] * leaving + pieces
                front, ahead = front + (placeholder + text) * leaving, ahead + shown * leaving
            for tokens, new in pieces:
                if tokens and moves and not new:
                    rotations.append(Rotate("", 1, 0, **costs.rotate(tokens)))
                if tokens and new:
                    forwards += composing_edits(costs, "", count)
                    forwards.append(Prefill("", behind, **costs.prefill(tokens, behind)))
                elif tokens and policy.survivors == "prefilled":
                    forwards += composing_edits(costs, "", count)
                    forwards.append(Recompute("", 0, behind, **costs.prefill(tokens, behind)))
                behind, count = behind + tokens, count + bool(tokens)
        else:
            behind, count = behind + (chunk + text) * chunks, count + shown * chunks

        forwards += composing_edits(costs, "", count)
        forwards.append(Prefill("", behind, **costs.prefill(chunk, behind)))
        behind, count, chunks = behind + chunk, count + 1, chunks + 1

        # A question reads what precedes it, and its KV is not kept; so does each token of the answer but the last.
        # Transitions in front of the chunk are composed already: its own comes behind them, once for all that is asked.
        questions = [(sizes.asked, behind)] if sizes.asked else []
        forwards += composing_edits(costs, "", min(count, 2)) if questions else []
        questions += [(1, behind + sizes.asked + number) for number in range(max(sizes.answered - 1, 0))]
        for tokens, before in questions:
            flops = costs.run(tokens, before) + costs.forward.logit
            forwards.append(Prefill("", before, bytes=costs.kv_bytes * before, flops=flops))

        read = behind + sizes.asked + sizes.answered
        if text:
            forwards += composing_edits(costs, "", count)
            forwards.append(Prefill("", behind, **costs.prefill(text, behind)))
        yield [*rotations, *forwards], max(read, behind + text)


def _bounds(
    policy: EvictionPolicy, sizes: LoopSizes, promise: Promise, certificate: AnyCertificate | None
) -> tuple[float | None, float | None, str | None]:
    """Returns bounds on KL and flips, as a plan has them, and how the window exceeds the certificate."""
    # Where one chunk stays it is the new one, and nothing survives.
    if policy.high is None or policy.survivors == "prefilled" or policy.low == 1 or promise == "remember":
        return 0.0, 0.0, None

    # All pieces behind the lead are survivors, or prefilled behind survivors.
    shown: list[tuple[int | None, str | None]] = [(sizes.span or sizes.chunk, sizes.modality)]
    if sizes.text:
        shown.append((sizes.text, "text"))
    shown *= policy.high
    beyond = None
    if certificate is not None:
        beyond = certificate.beyond(sizes.lead + (sizes.chunk + sizes.text) * policy.high, shown)
    bounds, others = CertifiedBounds(certificate, promise, len(shown), beyond), len(shown) - 1
    flips = bounds.growing("flips", SURVIVOR_WAYS)
    return bounds.kl(SURVIVOR_WAYS, others), flips[others] if others < len(flips) else None, beyond


def _reason_against(price: PolicyPrice, goal: Goal, sizes: LoopSizes, keep_text: bool, uncertified: bool) -> str | None:
    """Returns why a policy does not do what is asked; None if it does."""
    if keep_text and not price.policy.grows:
        return "texts leave with their chunks"
    if sizes.limit is not None and price.tokens > sizes.limit:
        return f"{price.tokens} tokens exceed the limit of {sizes.limit}"

    # As of a plan: without a bound on the loss, a budget takes whatever is certified.
    bounded = goal.kl is not None or goal.flips is not None
    if price.kl is None and (bounded or not uncertified):
        return f"uncertified ({price.beyond})" if price.beyond else "nothing bounds what its survivors lose"
    if price.kl and not bounded and not goal.budgeted and not uncertified:
        return "the goal is what the window promises"
    if goal.kl is not None and price.kl is not None and price.kl > goal.kl:
        return f"KL {price.kl:.3g} is beyond the goal"
    if goal.flips is not None and (price.flips is None or price.flips > goal.flips):
        return "flips are not bounded" if price.flips is None else f"flips {price.flips:.3g} are beyond the goal"

    if goal.bytes is not None and price.worst_bytes > goal.bytes:
        return f"a step of {price.worst_bytes} bytes is beyond the goal"
    if goal.seconds is not None and price.worst_seconds > goal.seconds:
        return f"a step of {price.worst_seconds:.3g} s is beyond the goal"
    return None


def _check_numbers(low: Any, high: Any) -> None:
    """Refuses numbers of chunks that are no bounds."""
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in (low, high))
    if not whole or not 1 <= low <= high < LIMIT:
        raise PlanError(f"policies: got {low!r:.40} to {high!r:.40} chunks; expected 1 <= low <= high")


def _check_arguments(sizes: Any, costs: Any, devices: Any, promise: Any, certificate: Any) -> None:
    """Refuses arguments of other types, and a certificate of another backbone."""
    for name, value, kind, expected in (
        ("sizes", sizes, LoopSizes, "LoopSizes"),
        ("costs", costs, Costs, "Costs, such as Costs.of(backbone)"),
        ("devices", devices, DeviceCosts | None, "DeviceCosts, or None"),
    ):
        if not isinstance(value, kind):
            raise PlanError(f"policies.{name}: got {value!r:.80}; expected {expected}")
    if promise not in ("remember", "forget"):
        raise PlanError(f"policies.promise: got {promise!r:.80}; expected 'remember' or 'forget'")
    if not isinstance(certificate, AnyCertificate | None):
        raise CertificateError(f"policies.certificate: got {certificate!r:.80}; expected Certificate.read(…), or None")
    if certificate is not None and certificate.backbone != costs.backbone:
        raise CertificateError(
            f"policies.certificate: got {certificate.model!r:.80} of backbone {certificate.backbone[:16]!r}; expected "
            f"backbone {costs.backbone[:16]!r}"
        )
