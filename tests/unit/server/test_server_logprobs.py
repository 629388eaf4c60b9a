"""`LogprobWriter`: the order of the likely tokens."""

from typing import Any

import pytest
from octavo_engine.frontend.outputs import Logprob
from octavo_server.openai.logprobs import LogprobWriter


class Codec:
    def token_bytes(self, token_id: int) -> bytes:
        return self.token_str(token_id).encode()

    def token_str(self, token_id: int) -> str:
        return f"<{token_id}>"


@pytest.mark.parametrize("chosen", [30, 31, 33, 69])
def test_equal_tokens_are_listed_by_id_whichever_was_chosen(chosen: int) -> None:
    ranks = {chosen: chosen - 29} | {30 + i: 1 + i for i in range(3)}
    position = {token: Logprob(-1.5, rank) for token, rank in ranks.items()}
    codec: Any = Codec()
    (token,) = LogprobWriter(codec, num_top=3, as_ids=False).chat([position]).content
    assert token.token == f"<{chosen}>"
    assert [each.token for each in token.top_logprobs] == ["<30>", "<31>", "<32>"]
