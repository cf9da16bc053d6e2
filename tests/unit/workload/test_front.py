"""The HTTP server in front of an engine that always answers: each kind of request has its answer."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from rljob_workload.data.tokenizer import BOS
from rljob_workload.runtime.monitor import Monitor
from rljob_workload.server import openai
from rljob_workload.server.desk import Desk
from rljob_workload.server.errors import ServerError
from rljob_workload.server.front import Front
from rljob_workload.server.openai import MOST_ANSWERS

from .serving import ALLOWED, SAID, TOKEN, Served, limits, post, served, until, waiting


async def test_a_completion_tells_text_tokens_logprobs_versions_and_usage(server: Served) -> None:
    status, answer = await post(server, {"model": "agent", "prompt": "123=", "n": 2, "logprobs": 1, "return_token_ids": True})
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    choice = answer["choices"][0]
    assert choice["text"] == "123"
    assert choice["token_ids"] == list(SAID)
    assert choice["prompt_token_ids"] == [BOS, 4, 5, 6, 13]
    assert choice["logprobs"]["token_logprobs"] == [-0.25] * 3
    assert choice["policy_versions"] == [[0, 7]]
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}


async def test_a_chat_ends_at_its_stop_text_which_is_not_part_of_the_answer(server: Served) -> None:
    body = {"messages": [{"role": "user", "content": "123="}], "stop": "3", "logprobs": True}
    status, answer = await post(server, body, "/chat/completions")
    assert status == 200
    choice = answer["choices"][0]
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": "12"}, "stop")
    assert [part["logprob"] for part in choice["logprobs"]["content"]] == [-0.25] * 3


async def test_a_stream_is_events_and_ends_with_done(server: Served) -> None:
    body = {"prompt": "123=", "stream": True, "stream_options": {"include_usage": True}}
    async with aiohttp.ClientSession(headers=ALLOWED) as session, session.post(server.url + "/completions", json=body) as got:
        assert got.content_type == "text/event-stream"
        lines = [line for line in (await got.text()).split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == "123"
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, "length"]
    assert events[-1]["usage"]["completion_tokens"] == 3


async def test_several_prompts_of_one_request_have_their_answers_in_order(server: Served) -> None:
    status, answer = await post(server, {"prompt": ["1=", [BOS, 4]], "n": 2})
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [request.tokens for request in server.engine.seen] == [(BOS, 4, 13), (BOS, 4)]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"{", None, "the body is not JSON"),
        (b"[" * 5000, None, "the body is not JSON"),
        (b'{"prompt": "1=", "temperature": NaN}', None, "NaN is not a number"),
        ([1], None, "the body must be a JSON object"),
        (b'{"prompt": "1=", "temperature": 1' + b"0" * 400 + b"}", "temperature", "is no number from 0 to 100"),
        (b'{"prompt": "1=", "top_p": 1e400}', "top_p", "inf is no number from 0 to 1"),
        (b'{"prompt": "1=", "seed": 1' + b"0" * 5000 + b"}", None, "the body is not JSON"),
        ({"prompt": "1\ud800"}, "prompt", "is no character"),
        ({"prompt": "1=", "stop": "\udc80"}, "stop", "is no character"),
        ({"prompt": None, "prompt_token_ids": None}, "prompt", "is missing"),
        (
            {"prompt": "1=", "temperature": 1e-300},
            "temperature",
            "1e-300 is too small to divide by; 0 (greedy) or at least 0.0001",
        ),
        ({"prompt": "1=", "temperature": 1e-39}, "temperature", "1e-39 is too small"),
        ({"prompt": "1=", "top_p": 1e-46}, "top_p", "leaves no token"),
        ({"prompt": "1=", "best_of": True}, "best_of", "True is not supported; 1 is"),
        ({"prompt": "1=", "echo": 0}, "echo", "0 is not supported; False is"),
        ({"prompt": "1=", "stream_options": []}, "stream_options", "must be an object"),
        ({"prompt": "1=", "stream_options": {"include_usage": 1}}, "stream_options", "include_usage: 1 is not true or false"),
        ({}, "prompt", "is missing"),
        ({"prompt": ""}, "model", ""),
        ({"prompt": "12a="}, "prompt", "'a' is not in the model's alphabet"),
        ({"prompt": [BOS, 64]}, "prompt", "prompt[1]: 64 is no token id from 0 to 63"),
        ({"prompt": [[BOS], [True]]}, "prompt", "True is no token id"),
        ({"prompt": []}, "prompt", "must be a text"),
        ({"prompt": [[]]}, "prompt", "has no tokens"),
        ({"prompt": "1" * 15}, "prompt", "has 16 tokens, which leaves no room"),
        ({"prompt": "1" * 14, "max_tokens": 2}, "max_tokens", "2 with a prompt of 15 tokens exceed"),
        ({"prompt": "1=", "max_tokens": 5}, "max_tokens", "5 is no integer from 1 to 4"),
        ({"prompt": "1=", "max_tokens": 0}, "max_tokens", "0 is no integer"),
        ({"prompt": "1=", "temperature": -1}, "temperature", "-1 is no number from 0"),
        ({"prompt": "1=", "top_p": 0}, "top_p", "leaves no token"),
        ({"prompt": "1=", "n": 0}, "n", "0 is no integer"),
        ({"prompt": ["1="] * 2, "n": MOST_ANSWERS}, "n", f"at most {MOST_ANSWERS}"),
        ({"prompt": "1=", "seed": 1.5}, "seed", "1.5 is no integer"),
        ({"prompt": "1=", "stop": [""]}, "stop", "none of them empty"),
        ({"prompt": "1=", "stop": "x"}, "stop", "'x' is not in the model's alphabet"),
        ({"prompt": "1=", "logprobs": 5}, "logprobs", "5 is not supported"),
        ({"prompt": "1=", "stream": "yes"}, "stream", "yes is not true or false"),
        ({"prompt": "1=", "model": "gpt-4"}, "model", "'gpt-4' is not served; 'agent' is"),
        ({"prompt": "1=", "frequency_penalty": 1}, "frequency_penalty", "1 is not supported"),
        ({"prompt": "1=", "frobnicate": 1}, "frobnicate", "unknown parameter"),
        ({"prompt": "1=", "messages": []}, "messages", "unknown parameter of completions"),
    ],
)
async def test_what_the_engine_could_not_do_is_refused_at_the_front(
    server: Served, body: Any, param: str | None, words: str
) -> None:
    status, answer = await post(server, body)
    if not words:  # an empty text is the begin token alone
        assert status == 200
        return
    assert status == 400
    assert words in answer["error"]["message"]
    assert (answer["error"]["type"], answer["error"]["param"]) == ("invalid_request_error", param)
    assert server.engine.seen == []


async def test_null_is_the_same_as_nothing(server: Served) -> None:
    names = sorted(openai.SERVED["completions"] | openai.IGNORED | set(openai.NEUTRAL))
    status, answer = await post(server, dict.fromkeys(names) | {"prompt": "123="})
    assert (status, answer["choices"][0]["text"]) == (200, "123")


async def test_a_wrong_token_a_wrong_path_and_a_wrong_method_have_their_status(server: Served) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": "Bearer tök"}):
        status, answer = await post(server, {"prompt": "1="}, headers=headers)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert (await post(server, {}, "/embeddings"))[0] == 404
    assert (await post(server, {}, "/models"))[0] == 405
    assert (await post(server, {"reward": 1}, "/rollouts/1.0.0/result"))[0] == 404
    assert server.engine.seen == []


async def test_a_body_of_ten_megabytes_is_refused_with_and_without_its_length(server: Served) -> None:
    status, answer = await post(server, b"1" * 10_000_000)
    assert status == 413
    assert "at most 1048576" in answer["error"]["message"]

    async def parts() -> Any:
        for _ in range(100):
            yield b"1" * 100_000

    async with aiohttp.ClientSession(headers=ALLOWED) as session:
        async with session.post(server.url + "/completions", data=parts()) as response:
            assert response.status == 413
        async with session.post(server.url + "/completions", json={"prompt": "1="}) as response:
            assert response.status == 200


async def test_requests_wait_while_the_engine_is_down_and_none_fails(server: Served) -> None:
    server.engine.up = False
    waiting = [asyncio.create_task(post(server, {"prompt": "1="})) for _ in range(20)]
    done, _ = await asyncio.wait(waiting, timeout=0.2)
    assert done == set()
    server.engine.up = True
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 20


async def test_a_client_that_vanishes_takes_its_request_with_it(server: Served) -> None:
    """One before the engine has it, one after: neither disturbs those who stay."""
    server.engine.up = False
    stays = asyncio.create_task(post(server, {"prompt": "1="}))
    leaves = asyncio.create_task(post(server, {"prompt": "2="}))
    monitor, desk = server.engine.monitor, server.engine.desk
    await until(lambda: waiting(server) == 2)
    leaves.cancel()
    await until(lambda: waiting(server) == 1)
    with monitor.changing():
        (request,) = desk.take(0)
    stays.cancel()
    await until(lambda: not desk.wants(0))
    with monitor.changing():
        server.engine._answer([request])  # the engine did not know
    server.engine.up = True
    assert (await post(server, {"prompt": "3="}))[0] == 200


async def test_a_run_that_ends_tells_those_who_wait(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.engine.up = False
        waits = asyncio.create_task(post(server, {"prompt": "1="}))
        await until(lambda: waiting(server) == 1)
        await asyncio.to_thread(server.front.close)
        status, answer = await waits
        assert (status, answer["error"]["message"]) == (503, "the run is over")
        with pytest.raises(aiohttp.ClientConnectionError):
            await post(server, {"prompt": "1="})


async def test_an_answer_that_does_not_come_ends_with_a_timeout_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with served(tmp_path, answer_seconds=0.1) as server:
        server.engine.up = False
        status, answer = await post(server, {"prompt": "1="})
        assert (status, answer["error"]["type"]) == (504, "timeout_error")
        assert waiting(server) == 0


async def test_each_replica_has_a_port_of_its_own(tmp_path: Path) -> None:
    with served(tmp_path, replicas=2) as server:
        assert len({urlsplit(url).port for url in server.urls}) == 2
        for url in server.urls:
            async with aiohttp.ClientSession(headers=ALLOWED) as session, session.get(url + "/models") as response:
                assert [model["id"] for model in (await response.json())["data"]] == ["agent"]


def test_a_port_that_is_taken_and_a_token_that_is_not_there_are_named(tmp_path: Path) -> None:
    token = tmp_path / "token"
    with pytest.raises(ServerError, match=r"the server's token cannot be read from .*token: No such file"):
        front(token)
    token.write_text(" ")
    with pytest.raises(ServerError, match="token is empty"):
        front(token)
    token.write_text(TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ours = front(token)
        with pytest.raises(
            ServerError, match=rf"replica 0 cannot serve on 127\.0\.0\.1:{port} \(generation\.server\.port {port}\)"
        ):
            ours.start("127.0.0.1", port, 1)
        ours.close()


def front(token: Path) -> Front:
    return Front(Monitor(), Desk(), limits(), None, token_file=str(token), answer_seconds=1.0, rollout_seconds=1.0)
