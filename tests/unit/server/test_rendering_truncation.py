"""`without_oldest`: which messages of a conversation that is too long are left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo_engine.wire.errors import InvalidRequest
from octavo_server.openai.chat import ChatCompletionRequest
from octavo_server.openai.rendering import without_oldest

SIZE = 10
ROLES = st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=12)


def chat_of(roles, **fields):
    messages = [{"role": role, "content": str(i), "tool_call_id": "c"} for i, role in enumerate(roles)]
    return ChatCompletionRequest.model_validate({"model": "m", "messages": messages, **fields})


def size_of(chat):
    """Tokens of a prompt whose template takes any order of roles."""
    return SIZE * len(chat.messages)


def strict_size_of(chat):
    """Tokens of a prompt whose template wants a user's message first, and then the roles in turn, as Gemma's does."""
    roles = [message.role for message in chat.messages if message.role != "system"]
    if roles != (["user", "assistant"] * len(roles))[: len(roles)]:
        raise InvalidRequest("The roles must alternate.")
    return SIZE * len(chat.messages)


def left(chat, count_tokens, max_model_len):
    return [int(message.content) for message in without_oldest(chat, count_tokens, max_model_len).messages]


@pytest.mark.parametrize("count_tokens", [size_of, strict_size_of])
@pytest.mark.parametrize(
    ("max_model_len", "fields", "first"),
    [
        (1000, {}, 0),
        (91, {}, 0),
        (90, {}, 2),
        (60, {}, 4),
        (10, {}, 8),
        (100, {"max_tokens": 10}, 0),
        (100, {"max_tokens": 11}, 2),
        (100, {"max_completion_tokens": 45}, 4),
        (100, {"max_tokens": 1000}, 4),
    ],
)
def test_the_longest_end_that_leaves_room_for_the_answer_is_left(count_tokens, max_model_len, fields, first):
    chat = chat_of(["user", "assistant"] * 4 + ["user"], **fields)
    assert left(chat, count_tokens, max_model_len) == [*range(first, 9)]


@given(roles=ROLES, max_model_len=st.integers(1, 150), max_tokens=st.none() | st.integers(1, 200))
@pytest.mark.parametrize("count_tokens", [size_of, strict_size_of])
def test_a_cut_conversation_begins_with_a_user(count_tokens, roles, max_model_len, max_tokens):
    chat = chat_of(roles, max_tokens=max_tokens)
    kept = left(chat, count_tokens, max_model_len)
    room = min(max_tokens or 1, max(1, max_model_len // 2))

    def fits(indices):
        try:
            return count_tokens(chat.model_copy(update={"messages": [chat.messages[i] for i in indices]})) <= (
                max_model_len - room
            )
        except InvalidRequest:
            return False

    users = [i for i, role in enumerate(roles) if role == "user"]
    ends = [[i for i, role in enumerate(roles) if i >= start or role == "system"] for start in users]
    candidates = [[*range(len(roles))], *ends]
    assert kept == next((end for end in candidates if fits(end)), candidates[-1])
