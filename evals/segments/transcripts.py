"""Synthetic transcripts of ReAct and tool-calling agents, drawn from templates, with the ground truth of repeats.

A transcript is one prompt: a system text, schemas of tools, a worked example, a question and turns of Thought, Action
and Observation; it ends where the agent is to write its next call. Repeats stand at other positions, behind other text,
and many are edited: another time and request number in their middle, another figure, or their end cut off.
"""

import json
import random
from typing import NamedTuple

SYSTEMS = (
    "You are a research assistant. Answer the question by calling tools and reading what they return.",
    "You are the travel desk of a company. Plan trips and answer questions about places with the tools below.",
    "You are an analyst. Work step by step, use one tool in each step, and never guess a number that a tool can give.",
    "You help customers of an online shop. Look up orders and products before you answer, and be brief.",
    "You are a librarian with access to an archive. Find the passage that answers the question and quote it.",
)
RULES = (
    "Write a line that begins with Thought, then a line that begins with Action, which holds one call as JSON, and "
    "wait for the Observation. Repeat this until you know the answer, then write a line that begins with Final Answer."
)
TOOLS = {
    "search": (
        "Searches the archive for passages about a topic and returns the best ones, with their titles.",
        "query",
    ),
    "lookup": (
        "Returns the next sentence of the current page that contains a keyword, or says there is none.",
        "keyword",
    ),
    "calculator": ("Evaluates an arithmetic expression with the usual operators and brackets, exactly.", "expression"),
    "weather": ("Reports temperature, wind and rain of a city on a day, measured or forecast by its station.", "city"),
    "convert": ("Converts an amount from one currency or unit of measure to another, at today's rate.", "amount"),
    "orders": (
        "Lists the orders of a customer, newest first, each with its state and the day it was sent.",
        "customer",
    ),
    "stock": ("Tells how many pieces of a product lie in each store house, and when more will arrive.", "product"),
    "trains": ("Lists connections between two stations on a day, with changes, duration and price.", "route"),
    "calendar": ("Shows the appointments of a person between two days, and the gaps that are left.", "person"),
    "translate": ("Translates a sentence into another language and keeps names and numbers as they are.", "sentence"),
    "map": ("Measures the distance between two places by road, by rail or in a straight line.", "places"),
    "read": ("Opens a document by its number and returns the part of it that was asked for.", "document"),
}


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PLACES = _words("Lyon Porto Graz Turin Bergen Ghent Cork Vilnius Split Leipzig Malmo Tartu Bilbao Basel Krakow Utrecht")
RIVERS = _words("Rhone Douro Mur Po Dale Scheldt Lee Neris Jadro Elster Scania Emajogi Nervion Rhine Vistula Vecht")
GOODS = _words("silk cork steel cloth salt paper glass amber wine ships lace tiles clocks books copper herring")
TRADES = _words("printers weavers merchants bankers sailors brewers potters engineers tanners carpenters")
BUILDINGS = _words("bridge cathedral harbour university market hall railway station town wall museum canal theatre")


class TruthSpan(NamedTuple):
    """Characters start … stop-1 of a transcript that come from a template.

    Attributes:
      kind: "system", "tool", "example", "observation"; "free" text is of no template.
      edit: "none", "stamp" (a time and a number in the middle), "figure" (another number) or "cut" (half of it).
      content: the template's name: equal names are equal texts but for volatile spans; "" of free text.
      gives: names whose text it shows; what is cut does not show the whole.
      volatile: (start, stop) of the characters that are drawn anew each time.
    """

    start: int
    stop: int
    kind: str
    edit: str
    content: str
    gives: tuple[str, ...]
    volatile: tuple[tuple[int, int], ...]


class Transcript(NamedTuple):
    """A prompt and where its parts come from. It ends with "Action:"."""

    text: str
    spans: tuple[TruthSpan, ...]


class TranscriptPlan(NamedTuple):
    """Sizes of a set of transcripts.

    Attributes:
      count, seed: of transcripts. agents: how many have tools of their own, in one order.
      documents, examples: of the pools that transcripts draw from.
      shuffled: the share of transcripts whose tools were retrieved for the question, in an order of its own.
      edits: shares of observations without an edit, with a stamp, with another figure, and cut.
    """

    count: int = 300
    seed: int = 0
    agents: int = 5
    documents: int = 40
    examples: int = 8
    shuffled: float = 0.5
    edits: tuple[float, float, float, float] = (0.4, 0.3, 0.15, 0.15)


class _Writer:
    """Text so far, and the spans of it."""

    def __init__(self) -> None:
        self.text, self.spans = "", []

    def add(self, kind: str, content: str, *parts: str, edit: str = "none", gives: tuple[str, ...] = ()) -> None:
        """Adds a span; every second part is volatile."""
        start, volatile = len(self.text), []
        for number, part in enumerate(parts):
            if number % 2:
                volatile.append((len(self.text), len(self.text) + len(part)))
            self.text += part
        self.spans.append(TruthSpan(start, len(self.text), kind, edit, content, gives or (content,), tuple(volatile)))


def document(number: int) -> tuple[str, str, str, str]:
    """Writes document `number` in four parts: up to a figure, the figure, the rest of the first half, the second."""
    draw = random.Random(f"document {number}")
    place, river, goods = draw.choice(PLACES), draw.choice(RIVERS), draw.sample(GOODS, 3)
    first, second = draw.sample(BUILDINGS, 2)
    year = draw.randrange(1100, 1900)
    opening = f"{place} lies on the {river}, {draw.randrange(5, 300)} kilometres from the coast, and has about "
    rest = (
        f" thousand inhabitants. It was first named in {year} as a place where {draw.choice(TRADES)} sold {goods[0]} "
        f"and {goods[1]}. The old {second} burned down twice and was rebuilt in stone. "
    )
    sentences = [
        f"Its {first} was built in {year + draw.randrange(20, 90)} by people from {draw.choice(PLACES)}.",
        f"For {draw.randrange(2, 9)} centuries it lived on {goods[2]}, which it sent to {draw.choice(PLACES)}.",
        f"Today most people work in offices, and {draw.randrange(5, 60)} thousand of them come in by train.",
        f"A market is held on the square every {draw.choice(['Monday', 'Thursday', 'Saturday'])} until noon.",
        f"The {draw.choice(TRADES)} of the town still meet once a year in the hall beside the {first}.",
    ]
    return opening, str(draw.randrange(40, 900)), rest, " ".join(draw.sample(sentences, draw.randrange(2, 4)))


def _call(tool: str, argument: str) -> str:
    return json.dumps({"name": tool, "arguments": {TOOLS[tool][1]: argument}})


def _schema(tool: str) -> str:
    description, parameter = TOOLS[tool]
    parameters = {parameter: {"type": "string"}, "limit": {"type": "integer", "default": len(tool)}}
    return json.dumps({"name": tool, "description": description, "parameters": parameters}) + "\n"


def _volatile(draw: random.Random) -> str:
    day = f"2026-{draw.randrange(1, 13):02}-{draw.randrange(1, 29):02}"
    clock = f"{draw.randrange(24):02}:{draw.randrange(60):02}:00"
    return f"[{day}T{clock}Z request {draw.randrange(10**7, 10**8)}]"


def _example(number: int) -> str:
    draw = random.Random(f"example {number}")
    tool, place = draw.choice(list(TOOLS)), draw.choice(PLACES)
    goods = draw.sample(GOODS, 2)
    return (
        f"Example {number + 1}\nQuestion: Which goods made {place} rich, and who traded in them?\n"
        f"Thought: I should find a page about {place} and look for what was sold there.\n"
        f"Action: {_call(tool, place)}\n"
        f"Observation: The {draw.choice(TRADES)} of {place} dealt in {goods[0]} and {goods[1]} from "
        f"{draw.randrange(1200, 1800)} on, and built a {draw.choice(BUILDINGS)} with what they earned.\n"
        f"Thought: The page names both goods and traders, so that I can answer.\n"
        f"Final Answer: {goods[0]} and {goods[1]}.\n"
    )


def make_transcripts(plan: TranscriptPlan) -> list[Transcript]:
    """Draws all transcripts of a plan. Equal plans give equal transcripts."""
    return [_transcript(plan, number) for number in range(plan.count)]


def _transcript(plan: TranscriptPlan, number: int) -> Transcript:
    draw, writer = random.Random(f"{plan.seed} {number}"), _Writer()
    agent = draw.randrange(plan.agents)
    own = random.Random(f"agent {agent}").sample(list(TOOLS), 4)

    # Half of the agents say when they were called, which ends every exact prefix there.
    system = SYSTEMS[agent % len(SYSTEMS)]
    if agent % 2:
        parts = (f"System: {system} ", f"Called {_volatile(draw)}.", f" {RULES}\n")
        writer.add("system", f"system {agent}", *parts, edit="stamp")
    else:
        writer.add("system", f"system {agent}", f"System: {system} {RULES}\n")

    tools = draw.sample(list(TOOLS), draw.randrange(3, 5)) if draw.random() < plan.shuffled else own
    for tool in tools:
        writer.add("tool", tool, _schema(tool))
    example = draw.randrange(plan.examples)
    writer.add("example", f"example {example}", _example(example))

    place = draw.choice(PLACES)
    question = f"How long has {place} sold {draw.choice(GOODS)}, and what did its {draw.choice(TRADES)} build?"
    writer.add("free", "", f"Question: {question}\n")
    for turn in range(draw.randrange(1, 3)):
        thought = f"Step {turn + 1}: I need to know more about {draw.choice(GOODS)} and the {draw.choice(BUILDINGS)}."
        call = _call(draw.choice(tools), f"{place} {draw.choice(GOODS)}")
        writer.add("free", "", f"Thought: {thought}\nAction: {call}\n")
        _observe(writer, draw, draw.randrange(plan.documents), plan.edits)
    writer.add("free", "", f"Thought: Next I should look for what {place} built.\nAction:")
    return Transcript(writer.text, tuple(writer.spans))


def _observe(writer: _Writer, draw: random.Random, page: int, edits: tuple[float, ...]) -> None:
    """Writes an observation of a document with one of the edits, or with none."""
    edit = draw.choices(("none", "stamp", "figure", "cut"), edits)[0]
    opening, figure, rest, end = document(page)
    opening = f"Observation: {opening}"
    whole, half = f"document {page}", f"half {page}"
    if edit == "stamp":
        parts = (f"{opening}{figure}{rest}", _volatile(draw), f" {end}\n")
    elif edit == "figure":
        parts = (opening, str(draw.randrange(40, 900)), f"{rest}{end}\n")
    elif edit == "cut":
        parts = (f"{opening}{figure}{rest.rstrip()}\n",)
    else:
        parts = (f"{opening}{figure}{rest}{end}\n",)
    content = half if edit == "cut" else whole
    writer.add("observation", content, *parts, edit=edit, gives=(half,) if edit == "cut" else (whole, half))
