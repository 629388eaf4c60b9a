"""`Upgrade`, CONNECT and trailers, sent directly and through an nginx that is configured as ingress-nginx does.

No request may be served that was not sent, and no response may reach another connection.
"""

import asyncio
import itertools

import pytest
import pytest_asyncio
from octavo_testing.framing_attacks import ATTACKS, FOREIGN, SMUGGLED, in_segments, smuggling
from octavo_testing.nginx import ingress
from octavo_testing.raw_http import RawConnection, ask, completion_body, request_bytes

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

NUM_VICTIMS = 4
#: Pauses between head and body: nginx forwards both together, or one before the other.
PAUSES_S = (0.0, 0.0002, 0.001, 0.005)
ROUNDS = 6
TRAILERS = {"x-evil", "x-octavo-secret", "x-octavo-tenant"}

numbers = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["direct", "nginx"])
async def port(request, server, tmp_path_factory):
    if request.param == "direct":
        yield server.port
        return
    with ingress(tmp_path_factory.mktemp("ingress") / "nginx", server.port) as port:
        yield port


async def send_attack(port, attack, name):
    """Responses to the attack, and to one more request if the server still accepts it."""
    last = f"{name}-last"
    async with await RawConnection.open(port) as connection:
        await connection.send(*attack.segments)
        await connection.read_answers(attack.num_requests)
        if not connection.is_closed:
            await connection.send(request_bytes(completion_body(last), lines=[b"Connection: close"]))
        answers = await connection.read_to_end()
        assert not connection.fault
        assert connection.is_closed, f"the server keeps a connection that has no request left; {len(answers)} answers"
    if answers and answers[-1].text.startswith(last):
        answers.pop()
    return answers


async def ask_as_victims(port):
    prompts = [f"victim-{next(numbers)}" for _ in range(NUM_VICTIMS)]
    answers = await asyncio.gather(*(ask(port, prompt) for prompt in prompts))
    assert [
        (answer.status, answer.text.startswith(prompt)) for answer, prompt in zip(answers, prompts, strict=True)
    ] == [(200, True)] * NUM_VICTIMS


@pytest.mark.parametrize("kind", ATTACKS)
async def test_a_request_ends_at_its_framing(server, port, kind):
    name = f"{kind}-{next(numbers)}"
    attack = ATTACKS[kind](name)
    before = len(server.prompts())

    answers = await send_attack(port, attack, name)
    await ask_as_victims(port)

    new = server.prompts()[before:]
    assert [prompt for prompt in new if SMUGGLED in prompt] == []
    assert [prompt for prompt in new if prompt in attack.served] == [*attack.served]
    assert len(answers) <= attack.num_requests
    if attack.served:
        assert [answer.status for answer in answers] == [200] * len(attack.served)
        assert all(answer.text.startswith(prompt) for answer, prompt in zip(answers, attack.served, strict=True))
    assert all(answer.headers.get("x-request-id") != "evil" for answer in answers)


async def test_trailers_reach_no_replica(server, port):
    name = f"trailers-{next(numbers)}"
    await send_attack(port, ATTACKS["trailers"](name), name)
    found = [seen for replica in server.replicas for seen in replica.seen if seen.prompt == name]
    assert len(found) == len(server.replicas[:1])
    assert not any(TRAILERS & seen.headers.keys() for seen in found)
    assert all(seen.headers["content-length"] == str(len(seen.body)) for seen in found)


async def test_no_client_gets_the_response_of_another(server, port):
    """The response to a request hidden in another one's body would reach a victim on a shared connection."""
    for turn in range(ROUNDS):
        async with await RawConnection.open(port) as attacker:
            segments = in_segments(request_bytes(smuggling(f"{SMUGGLED}-{turn}"), lines=FOREIGN), is_split=True)
            await attacker.send(*segments, pause_s=PAUSES_S[turn % len(PAUSES_S)])
            await attacker.read_answers(1)
            await ask_as_victims(port)
    assert [prompt for prompt in server.prompts() if SMUGGLED in prompt] == []
