"""lm-eval's `local-completions` against a live server: it reads our log-probabilities as it reads OpenAI's."""

import pytest
from serve_tools import LiveServer, tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("tenacity", reason="lm-eval's clients need it: pip install tenacity")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(folder)
    with LiveServer() as server:
        yield LocalCompletionsAPI(
            model="fake",
            base_url=f"{server.url}/v1/completions",
            tokenizer=str(folder),
            tokenizer_backend="huggingface",
            batch_size=4,
            max_length=256,
        )


def instances(kind: str, arguments: list[tuple]) -> list:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, place) for place, given in enumerate(arguments)]


def test_likelihoods_are_summed_over_the_continuation(model):
    pairs = [("the cat", " sat"), ("the", " cat sat on the mat"), ("a", "b")]
    found = model.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    lengths = [len(tokenizer()(text)["input_ids"]) for _, text in pairs]
    assert found == [(-0.5 * length, True) for length in lengths]


def test_rolling_likelihoods_cover_every_token_but_the_first(model):
    (found,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", [("the cat sat",)]), disable_tqdm=True)
    assert found == -0.5 * len(tokenizer()("the cat sat")["input_ids"])


def test_texts_are_continued_until_a_stop(model):
    asked = [("the cat sat", {"until": ["sat"], "max_gen_toks": 20}), ("ab", {"until": ["x"], "max_gen_toks": 20})]
    assert model.generate_until(instances("generate_until", asked), disable_tqdm=True) == ["the cat ", "ab"]
