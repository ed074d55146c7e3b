"""How one asks about a Python function: to complete it, to explain it, to test it, to find what is wrong."""

from __future__ import annotations

import random
import re
import textwrap
from dataclasses import dataclass

VERBS = re.compile(
    "(add|adjust|append|apply|build|calculate|call|change|check|clear|close|collect|combine|compare|compute|"
    "concatenate|connect|construct|convert|copy|count|create|decode|delete|determine|divide|draw|emit|encode|"
    "ensure|evaluate|execute|expand|extract|fetch|fill|find|format|generate|get|give|handle|insert|iterate|join|"
    "load|log|make|map|mark|merge|move|multiply|normalize|open|parse|plot|print|produce|provide|push|put|raise|"
    "read|reduce|register|release|remove|render|replace|report|reset|resolve|retrieve|return|run|save|search|"
    "select|send|set|show|simplify|sort|split|start|stop|store|subtract|take|transform|translate|try|turn|update|"
    "use|validate|verify|wait|wrap|write|yield)(e?s)?"
)


@dataclass(frozen=True)
class Function:
    """A documented function as it stands in its source, without decorators, at the left margin."""

    name: str
    owner: str | None  # the class, for a method
    signature: str
    docstring: str
    body: str
    documentation: str  # the docstring's text
    imports: tuple[str, ...]  # those that it uses

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.documentation.split("\n", 1)[0]

    @property
    def summary(self) -> str:
        """The first sentence of the docstring, on one line."""
        paragraph = " ".join(self.documentation.split("\n\n", 1)[0].split())
        sentence = re.split(r"(?<=[.!?])\s", paragraph, maxsplit=1)[0].replace("``", "`")
        return sentence if sentence.endswith((".", "!", "?")) else sentence.rstrip(":;,") + "."

    @property
    def does(self) -> str:
        """What follows "a function that": `returns the sum` for `Return the sum.`; nothing where no verb leads."""
        first, _, rest = self.summary.rstrip(".").partition(" ")
        verb = VERBS.fullmatch(first.lower())
        if verb is None or not 25 <= len(self.summary) <= 300:
            return ""
        if verb[2]:
            return f"{verb[0]} {rest}"
        if re.search("[^aeiou]y$", verb[1]):
            return f"{verb[1][:-1]}ies {rest}"
        return f"{verb[1]}{'es' if verb[1].endswith(('ch', 'sh', 'ss', 'x')) else 's'} {rest}"


COMPLETE, DESCRIBE, DOCUMENT, REPAIR = "complete", "describe", "document", "repair"
WEIGHTS = {COMPLETE: 9, DESCRIBE: 4, "explain": 3, DOCUMENT: 1.5, "test": 1.5, "improve": 2, REPAIR: 1}

WORDINGS: dict[str, tuple[str, ...]] = {
    COMPLETE: (
        "",
        "",
        "Complete this {function}:",
        "Complete the following Python code.",
        "Implement this {function}. Reply with code only.",
        "Fill in the body of this {function}.",
        "Finish the {function} `{name}` so that it does what its docstring says.",
        "Here are the signature and docstring of a {function}. Please write the rest.",
        "Can you implement `{name}` for me?",
        "Write the body of `{name}` and explain your solution in a sentence or two.",
        "Please provide a working Python implementation:",
    ),
    DESCRIBE: (
        "Write a Python {function} that {does}.",
        "I need a Python {function} that {does}.",
        "How can I write a {function} in Python that {does}?",
        "Write a {function} called `{name}` that {does}.",
        "Implement `{header}` in Python. What it should do: {summary}",
        "Python: {summary} How would you code this?",
        "Show me how to write a {function} named `{name}`. {summary} Add a short example of its use.",
        "Task: {summary}\nLanguage: Python\nSignature: `{header}`",
    ),
    "explain": (
        "Explain what this {function} does.",
        "What does this code do?",
        "Walk me through `{name}` line by line.",
        "Explain this Python code to a beginner.",
        "What does `{name}` return, and when would I use it?",
        "I found this in a code base. What is it for?",
        "What is the time complexity of this {function}?",
        "Describe in one sentence what `{name}` does.",
    ),
    DOCUMENT: (
        "Add a docstring to this {function}.",
        "Write documentation for `{name}`.",
        "Please add comments and a docstring to this code.",
        "Add type hints to this {function}.",
    ),
    "test": (
        "Write unit tests for this {function} with pytest.",
        "What test cases would you write for `{name}`?",
        "Write a few assert statements that check `{name}`.",
        "Which edge cases should I test here?",
    ),
    "improve": (
        "Refactor this {function} to make it easier to read.",
        "Review this code and suggest improvements.",
        "Can this {function} be made faster?",
        "Rewrite `{name}` in JavaScript.",
        "Translate this {function} to Java.",
        "Simplify this code.",
        "Add error handling to `{name}`.",
        "Give `{name}` a better name and tell me why it fits.",
    ),
    REPAIR: (
        "Find the bug in this {function}.",
        "This {function} does not work as expected. What is wrong with it?",
        "`{name}` gives me wrong results. Can you fix it?",
        "Is this code correct? If not, correct it.",
        "Debug this:",
    ),
}
SLIPS = (
    (" == ", " != "),
    (" < ", " > "),
    (" > ", " >= "),
    (" <= ", " < "),
    (" + ", " - "),
    (" - 1", " + 1"),
    (" and ", " or "),
    (" not ", " "),
    ("True", "False"),
    ("[0]", "[1]"),
    (" is None", " is not None"),
)


def requests_in_drawn_order(draw: random.Random) -> list[str]:
    """All sorts of requests, the weightier ones earlier more often (Efraimidis and Spirakis, 2006)."""
    return sorted(WEIGHTS, key=lambda request: -(draw.random() ** (1 / WEIGHTS[request])))


def ask(request: str, function: Function, draw: random.Random) -> str:
    """One prompt of this sort about this function."""
    if request == DESCRIBE and not function.does:
        request = COMPLETE
    sort = "method" if function.owner else "function"
    wording = draw.choice(WORDINGS[request]).format(
        name=function.name,
        function=f"method for a class `{function.owner}`" if function.owner and request == DESCRIBE else sort,
        header=" ".join(function.signature.split()).rstrip(":"),
        summary=function.summary,
        does=function.does,
    )
    if request == DESCRIBE:
        return wording
    code = _code(request, function, draw)
    if not wording:
        return code
    shown = draw.choice(("```python\n{}\n```", "```python\n{}\n```", "```\n{}\n```", "{}")).replace("{}", code)
    return "\n\n".join((shown, wording) if draw.random() < 0.25 and wording[-1] != ":" else (wording, shown))


def _code(request: str, function: Function, draw: random.Random) -> str:
    docstring = function.docstring if draw.random() < 0.5 else _without_examples(function.docstring)
    if request == COMPLETE:
        parts = [function.signature, docstring]
    elif request == DOCUMENT or (request != REPAIR and draw.random() < 0.5):
        parts = [function.signature, function.body]
    else:
        body = _with_a_slip(function.body, draw) if request == REPAIR else function.body
        parts = [function.signature, docstring, body]
    code = "\n".join(part.strip("\n") for part in parts)
    if function.owner:
        code = f"class {function.owner}:\n" + textwrap.indent(code, "    ")
    if function.imports and draw.random() < 0.4:
        code = "\n".join(function.imports) + "\n\n\n" + code
    return code


def _without_examples(docstring: str) -> str:
    """The docstring without its doctests, nor the heading that announced them."""
    kept: list[str] = []
    in_example = False
    *lines, last = docstring.split("\n")
    for line in lines:
        in_example = line.lstrip().startswith(">>>") or (in_example and bool(line.strip()))
        if in_example:
            while kept and re.fullmatch(r"\s*(?:(?:for )?examples?:{0,2}|[-=~]*)", kept[-1], re.IGNORECASE):
                kept.pop()
        else:
            kept.append(line)
    if last.lstrip().startswith(">>>") or in_example:
        last = last[: len(last) - len(last.lstrip())] + docstring[-3:]
    return "\n".join([*kept, last])


def _with_a_slip(body: str, draw: random.Random) -> str:
    """The body with one small thing wrong, where there is something to get wrong."""
    slips = [(place.start(), right, wrong) for right, wrong in SLIPS for place in re.finditer(re.escape(right), body)]
    if not slips:
        return body
    start, right, wrong = draw.choice(slips)
    return body[:start] + wrong + body[start + len(right) :]
