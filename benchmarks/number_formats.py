"""What number formats cost in quality on a CPU: perplexity, and agreement with the model in float32.

    python benchmarks/number_formats.py TEXT [--target FILE.gguf] [--kilobytes 200] [--probes 200] [--out FILE.json]

TEXT: plain text, or JSON lines with a `prompt`. Every format reads the same tokens in windows of 512. llama.cpp
(`pip install xllamacpp`) is asked for its next token at some of the same places, where it is there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftgraph.engine.borrowing import Loan
from draftgraph.engine.paged import PagedEngine
from draftgraph.engine.protocol import Segment
from draftgraph.models.fetch import installed_gguf, kept_gguf
from draftgraph.models.load import load_model
from draftgraph.notices import progress_bar

WINDOW = 512
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "the file's own": {},
}
MANY = 2000  # tokens of which llama.cpp tells the probability at a place


def text_of(path: Path, kilobytes: int) -> str:
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        content = "\n\n".join(json.loads(line)["prompt"] for line in content.splitlines())
    return content.encode()[: 1024 * kilobytes].decode(errors="ignore")


def windows_of(tokens: list[int]) -> list[list[int]]:
    return [tokens[start : start + WINDOW] for start in range(0, len(tokens) - WINDOW + 1, WINDOW)]


@torch.no_grad()
def read(model: Any, windows: list[list[int]], title: str) -> tuple[Any, Any]:
    """Of every place but a window's last: the best next token, and the log-probability of the real one."""
    engine = PagedEngine(model)
    best, chances = [], []
    with Loan(model), progress_bar(title) as report:
        for number, window in enumerate(windows):
            context = engine.open()
            logits = engine.run([Segment.of_text(context, window, scored=True)])[0].logits[:-1].float()
            real = torch.tensor(window[1:])
            chances.append(torch.log_softmax(logits, dim=-1).gather(1, real[:, None])[:, 0])
            best.append(logits.argmax(dim=-1))
            context.rewind(0)
            report((number + 1) / len(windows))
    return torch.cat(best).numpy(), torch.cat(chances).double().numpy()


def ask_llama(file: Path, windows: list[list[int]], places: list[tuple[int, int]]) -> tuple[Any, Any]:
    """The same at some places, a number of a window and one of a token; -inf: it was not among the first MANY."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(file), WINDOW, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    server, best, chances = xllamacpp.Server(params), [], []
    with progress_bar("llama.cpp") as report:
        for number, (window, place) in enumerate(places):
            tokens = windows[window]
            asked = {"prompt": tokens[: place + 1], "max_tokens": 1, "temperature": 0.0, "logprobs": MANY}
            told = server.handle_completions(asked)["choices"][0]["logprobs"]
            found = told["content"][0]["top_logprobs"]
            by_token = {one["id"]: one["logprob"] for one in found}
            best.append(found[0]["id"])
            chances.append(by_token.get(tokens[place + 1], -np.inf))
            report((number + 1) / len(places))
    return np.array(best), np.array(chances)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--kilobytes", type=int, default=200)
    parser.add_argument("--probes", type=int, default=200)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    _, tokenizer = load_model(given.target, device="cpu")
    windows = windows_of(tokenizer(text_of(given.text, given.kilobytes))["input_ids"])
    draw, per = np.random.default_rng(0), WINDOW - 1
    places = [(int(draw.integers(len(windows))), int(draw.integers(32, per))) for _ in range(given.probes)]
    flat = np.array([window * per + place for window, place in places])
    found = {}
    for name, options in FORMS.items():
        model, _ = load_model(given.target, device="cpu", **options)
        found[name] = read(model, windows, name)
        del model
    reference, _ = found["float32"]
    rows = [
        {
            "format": name,
            "perplexity": float(np.exp(-chances.mean())),
            "agreement": float((best == reference).mean()),
            "agreement_at_probes": float((best == reference)[flat].mean()),
            "perplexity_at_probes": float(np.exp(-chances[flat].mean())),
        }
        for name, (best, chances) in found.items()
    ]
    try:
        file = Path(given.target) if given.target else installed_gguf() or kept_gguf()
        best, chances = ask_llama(file, windows, places)
        told = np.isfinite(chances)
        same = (best == reference[flat]).mean()
        ours = np.exp(-found["float32"][1][flat][told].mean())
        rows.append({"format": "llama.cpp", "agreement_at_probes": float(same), "places_told": int(told.sum()),
                     "perplexity_where_told": float(np.exp(-chances[told].mean())),
                     "perplexity_of_float32_there": float(ours)})  # fmt: skip
    except ImportError:
        print("no llama.cpp here: pip install xllamacpp", file=sys.stderr)
    result = {"tokens": len(windows) * per, "probes": len(places), "rows": rows}
    print(json.dumps(result, indent=2))
    if given.out:
        given.out.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
