import pytest
from octavo_engine.frontend.output_stream import RequestAssembly
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.text.tokenizer import load_tokenizer
from octavo_engine.wire.records import EngineRequest, ErrorInfo, SeqOutput, Timing, TokenLogprobs
from octavo_engine.wire.sampling import SamplingParams
from octavo_testing.scripted import EOS, text_ids, write_byte_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    return load_tokenizer(resolve_model(str(folder), load_format="dummy"))


@pytest.fixture
def assemble(tokenizer):
    def make(**params):
        request = EngineRequest(request_id="core", prompt_token_ids=[1, 2], params=SamplingParams(**params))
        return RequestAssembly(request_id="r", prompt=None, request=request, tokenizer=tokenizer)

    return make


def out(text="", *, tokens=None, index=0, **fields):
    return SeqOutput(request_id="core", index=index, token_ids=text_ids(text) if tokens is None else tokens, **fields)


def feed(assembly, text, *, finish=None, chunk=1):
    """Push token by token (or in chunks); return the indices of the pushes that request an abort."""
    ids = text_ids(text)
    pieces = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
    asked = [i for i, piece in enumerate(pieces) if assembly.push(out(tokens=piece), 1.0)]
    if finish:
        assembly.push(out(finish_reason=finish), 1.0)
    return asked


def completion(assembly):
    return assembly.take_output("final").outputs[0]


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_a_stop_string_ends_text_and_tokens_at_its_last_token(assemble, chunk):
    assembly = assemble(stop=["END", "never"])
    assert len(feed(assembly, "go on END more", chunk=chunk)) == 1
    done = completion(assembly)
    assert (done.text, done.finish_reason, done.stop_reason) == ("go on ", "stop", "END")
    assert done.token_ids == text_ids("go on END")


def test_a_stop_string_can_be_included(assemble):
    assembly = assemble(stop=["END"], include_stop_str_in_output=True)
    feed(assembly, "go END more")
    assert completion(assembly).text == "go END"


def test_a_stop_string_in_the_last_record_needs_no_abort(assemble):
    assembly = assemble(stop=["END"])
    assert not assembly.push(out("go END", finish_reason="length", timing=Timing(queue_s=1.0)), 1.0)
    done = completion(assembly)
    assert (done.finish_reason, done.stop_reason, done.timing.queue_s) == ("stop", "END", 1.0)


def test_held_back_text_comes_at_the_end(assemble):
    assembly = assemble(stop=["END"])
    feed(assembly, "the EN", finish="length")
    done = completion(assembly)
    assert (done.text, done.finish_reason, done.stop_reason) == ("the EN", "length", None)


def test_min_tokens_come_before_any_stop_string(assemble):
    assembly = assemble(stop=["a"], min_tokens=3)
    feed(assembly, "aaaba")
    assert (completion(assembly).text, completion_tokens(assembly)) == ("aaab", 5)


def completion_tokens(assembly):
    return len(assembly.sequences[0].token_ids)


def test_the_stop_token_is_counted_but_not_shown(assemble):
    for include, text in ((False, "ab"), (True, "abc")):
        assembly = assemble(stop_token_ids=[ord("c")], include_stop_str_in_output=include)
        assembly.push(out("abc", finish_reason="stop", stop_reason=ord("c")), 1.0)
        done = completion(assembly)
        assert (done.text, done.token_ids, done.stop_reason) == (text, text_ids("abc"), ord("c"))


def test_special_tokens_are_shown_on_request(assemble):
    for skip, text in ((True, "ab"), (False, "a<|im_start|>b")):
        assembly = assemble(skip_special_tokens=skip)
        assembly.push(out(tokens=[ord("a"), 257, ord("b"), EOS], finish_reason="stop"), 1.0)
        assert completion(assembly).text == text


def test_detokenize_false_gives_only_tokens(assemble):
    assembly = assemble(detokenize=False)
    feed(assembly, "abc", finish="length")
    assert (completion(assembly).text, completion_tokens(assembly)) == ("", 3)


def test_records_after_the_end_are_dropped(assemble):
    assembly = assemble(stop=["b"])
    feed(assembly, "abcd")
    assert not assembly.push(out("x", finish_reason="abort"), 2.0)
    assert (completion(assembly).text, completion_tokens(assembly)) == ("a", 2)


def test_delta_shows_only_sequences_that_advanced(assemble):
    assembly = assemble(n=2)
    assembly.push(out("a", index=1), 1.0)
    taken = assembly.take_output("delta")
    assert [(c.index, c.text) for c in taken.outputs] == [(1, "a")]
    assert assembly.take_output("delta") is None
    assembly.push(out("b", index=1), 2.0)
    assembly.push(out("", index=0, finish_reason="error", error=ErrorInfo("broken", "invalid_request")), 2.0)
    taken = assembly.take_output("delta")
    assert [(c.index, c.text, c.finish_reason) for c in taken.outputs] == [(0, "", "error"), (1, "b", None)]
    assert (taken.error, taken.error_kind, taken.finished) == ("broken", "invalid_request", False)


def test_cumulative_shows_all_and_final_waits(assemble):
    assembly = assemble(n=2)
    assembly.push(out("a", index=1), 1.0)
    assert [c.text for c in assembly.take_output("cumulative").outputs] == ["", "a"]
    assert assembly.take_output("final") is None
    assembly.push(out("b", index=1, finish_reason="length"), 2.0)
    assembly.push(out("c", index=0, finish_reason="length"), 3.0)
    final = assembly.take_output("final")
    assert [c.text for c in final.outputs] == ["c", "ab"]
    assert (final.finished, final.metrics.first_token_s, final.metrics.last_token_s) == (True, 1.0, 3.0)


def test_logprobs_follow_the_tokens_and_sum_up(assemble):
    assembly = assemble(logprobs=2)
    entries = [TokenLogprobs([98, 97, 98], [-2.0, -0.5, -2.0], 2), TokenLogprobs([97, 97, 98], [-0.5, -0.5, -2.0], 1)]
    assembly.push(out("ba", logprobs=entries, finish_reason="length"), 1.0)
    done = completion(assembly)
    assert [list(position) for position in done.logprobs] == [[98, 97], [97, 98]]
    assert [(p.rank, p.decoded_token) for p in done.logprobs[0].values()] == [(2, "b"), (1, "a")]
    assert [p.rank for p in done.logprobs[1].values()] == [1, 2]
    assert done.cumulative_logprob == pytest.approx(-2.5)


def test_prompt_logprobs_of_chunks_are_joined_and_shared_by_all_sequences(assemble):
    assembly = assemble(n=2, prompt_logprobs=0)
    entry = TokenLogprobs([1], [-1.0], 7)
    assembly.push(out("a", prompt_logprobs=[None, entry]), 1.0)
    assembly.push(out("a", index=1, prompt_logprobs=[None, entry]), 1.0)
    assembly.push(out("b", prompt_logprobs=[entry], num_cached_tokens=16), 1.0)
    taken = assembly.take_output("delta")
    assert [p and p[1].rank for p in taken.prompt_logprobs] == [None, 7, 7]
    assert taken.num_cached_tokens == 16


def test_the_top_tokens_rank_from_1_to_k_even_if_the_chosen_token_ties(assemble):
    assembly = assemble(logprobs=3)
    entries = [TokenLogprobs([98, 97, 98, 99], [-1.0] * 4, 3)]
    assembly.push(out("b", logprobs=entries, finish_reason="length"), 1.0)
    (position,) = completion(assembly).logprobs
    assert {token_id: entry.rank for token_id, entry in position.items()} == {98: 2, 97: 1, 99: 3}
    assert next(iter(position)) == 98, "the chosen token comes first"


def test_entries_with_their_own_ranks_keep_them(assemble):
    assembly = assemble(logprob_token_ids=[97, 98])
    entry = TokenLogprobs([98, 97, 98], [-1.0, -3.0, -1.0], 2, ranks=[2, 40, 2])
    assembly.push(out("b", logprobs=[entry], finish_reason="length"), 1.0)
    done = completion(assembly)
    assert {token_id: entry.rank for token_id, entry in done.logprobs[0].items()} == {98: 2, 97: 40}
    assert done.cumulative_logprob == -1.0


@pytest.mark.parametrize("kind", ["delta", "cumulative"])
def test_stream_interval_batches_the_tokens_between_first_and_last(assemble, kind):
    assembly = assemble(stream_interval=3)
    lengths = []
    for i in range(9):
        assembly.push(out("a", finish_reason="length" if i == 8 else None), 1.0)
        taken = assembly.take_output(kind)
        lengths.append(len(taken.outputs[0].token_ids) if taken else 0)
    assert lengths == ([1, 0, 0, 3, 0, 0, 3, 0, 2] if kind == "delta" else [1, 0, 0, 4, 0, 0, 7, 0, 9])


def test_detokenize_false_leaves_decoded_tokens_unset(assemble):
    assembly = assemble(detokenize=False, logprobs=1, prompt_logprobs=0)
    entry = TokenLogprobs([98, 97], [-1.0, -0.5], 2)
    assembly.push(out("b", logprobs=[entry], prompt_logprobs=[None, entry], finish_reason="length"), 1.0)
    taken = assembly.take_output("final")
    positions = [*taken.outputs[0].logprobs, taken.prompt_logprobs[1]]
    assert [entry.decoded_token for position in positions for entry in position.values()] == [None] * 4


def test_delta_output_keeps_no_logprobs_that_were_taken(assemble):
    assembly = assemble(logprobs=0)
    taken = []
    for i in range(50):
        assembly.push(out("a", logprobs=[TokenLogprobs([97], [-1.0], 1)]), 1.0)
        if i % 3 == 2:
            taken += assembly.take_output("delta").outputs[0].logprobs
            assert len(assembly.sequences[0].logprobs) == 0
    assembly.push(out("b", logprobs=[TokenLogprobs([98], [-1.0], 1)], finish_reason="length"), 1.0)
    last = assembly.take_output("delta").outputs[0]
    assert (len(taken), len(last.logprobs), last.cumulative_logprob) == (48, 3, pytest.approx(-51.0))


def test_an_exception_ends_its_sequence_only(assemble, monkeypatch, caplog):
    assembly, other = assemble(n=2), assemble()

    def fail(token_id, *, hidden):
        raise ValueError("no such text")

    monkeypatch.setattr(assembly.sequences[1], "_add_text", fail)
    asked = [each.push(out("a", index=i), 1.0) for each, i in ((assembly, 0), (assembly, 1), (other, 0))]
    assert asked == [False, True, False]
    assert not assembly.push(out("b", index=1), 1.0), "the record was on its way when the sequence ended"
    for each in (assembly, other):
        each.push(out("b", finish_reason="length"), 1.0)
    assert [each.finish_reason for each in assembly.take_output("final").outputs] == ["length", "error"]
    assert (assembly.error.kind, completion(other).text, other.error) == ("internal", "ab", None)
    assert [record.exc_info[1].args for record in caplog.records] == [("no such text",)]


def test_a_delta_has_the_prompts_logprobs_once(assemble):
    assembly = assemble(prompt_logprobs=1)
    assembly.push(out("a", prompt_logprobs=[None, TokenLogprobs([5, 6], [-1.0, -0.5], 2)]), 1.0)
    assert len(assembly.take_output("delta").prompt_logprobs) == 2
    assembly.push(out("b", finish_reason="length"), 1.0)
    assert assembly.take_output("delta").prompt_logprobs is None
