"""Tests that an episode that hangs, kills its process or returns invalid values does not affect the others."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from app.environments.episode_pool import EpisodeReply, EpisodeStart
from app.plugins.values import Failure
from app.plugins.worker_process import MAX_PRINTED_BYTES
from settings.errors import InputError
from tests.environments.pools import Game, contents, opened, take, write
from tests.program import DEADLINE_S
from tests.reward.processes import WORKERS

pytestmark = WORKERS

STORY = """
    import contextlib, json, os, signal, threading, time
    from grpo import StepResult

    barrier = threading.Barrier(3)
    log = os.open(os.path.join(os.path.dirname(__file__), "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(*what):
        os.write(log, (json.dumps(what) + "\\n").encode())

    class Story:
        def reset(self, *, seed, prompt, **columns):
            self.told, self.seed = [], seed
            note("reset", seed)
            return columns.get("opening")

        def step(self, text, calls):
            note("step", self.seed, text)
            self.told.append(text)
            if text == "hang": time.sleep(1000)
            if text == "die once" and not os.path.exists("died"):
                open("died", "w").close()
                os._exit(3)
            if text == "bystander":
                if not os.path.exists(f"seen {self.seed}"):
                    open(f"seen {self.seed}", "w").close()
                    time.sleep(1000)
                for _ in range(50):  # is the culprit at work in this process?
                    if os.path.exists(f"culprit {os.getpid()}"): time.sleep(1000)
                    time.sleep(0.01)
            if text in ("culprit", "hung culprit"):
                while not (os.path.exists("seen 1") and os.path.exists("seen 2")): time.sleep(0.01)
                open(f"culprit {os.getpid()}", "w").close()
                time.sleep(1000 if text == "hung culprit" else 1)
                os._exit(3)
            if text == "meet": barrier.wait(60)
            if text == "raise": raise RuntimeError("out of luck")
            if text == "exit": os._exit(3)
            if text == "crash": signal.raise_signal(11)
            if text == "full": raise MemoryError
            if text == "scribble": os.write(1, b"\\xff\\x00" * 10**6)
            if text == "pipe":
                for fd in {*range(3, 30)} - {log}:
                    with contextlib.suppress(OSError): os.write(fd, b"{}\\n")
            if text == "fork" and not os.fork(): return StepResult("from the child")
            if text == "nan": return StepResult("a", reward=float("nan"))
            if text == "random": return StepResult(str(time.time_ns()))
            metrics = {"told": len(self.told)}
            return StepResult(" ".join(self.told), reward=0.5, terminated=text == "end", metrics=metrics)

        def score(self):
            note("score", self.seed)
            return {"length": len(self.told)}

        def close(self):
            note("close", self.seed)
            if self.told[-1:] == ["exit in close"]: os._exit(3)
"""


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return f"{write(tmp_path, STORY)}:Story"


def kind_of(reply: EpisodeReply) -> str | None:
    return reply.failure and reply.failure.kind


def noted(what: str) -> list[list[Any]]:
    lines = map(json.loads, Path("log").read_text().splitlines())
    return [rest for word, *rest in lines if word == what]


def test_an_episode_is_scored_and_closed_once_however_it_ends(story: str) -> None:
    with opened(source=story, concurrency=1) as pool:
        assert pool.load()["tools"] == []
        game = Game(pool, "q/s0", seed=7)
        first, last = game.play("once"), game.play("end")
        allowed = Game(pool, "q/s1", seed=8).play("a", is_last=True)
        played, unplayed = Game(pool, "a", seed=9), Game(pool, "b", seed=10)
        played.play("one")
        for game in (played, unplayed):
            pool.end(game.key, game.start, game.opening)
        cut, empty = take(pool, 2)
    assert (contents(first), first.reward, first.terminated, first.metrics) == (["once"], 0.5, False, {"told": 1})
    assert (contents(last), last.terminated, first.scores, last.scores) == (["once end"], True, {}, {"length": 2})
    assert (allowed.terminated, allowed.scores) == (False, {"length": 1})
    assert (cut.scores, empty.scores, empty.messages, empty.reward) == ({"length": 1}, {"length": 0}, [], 0.0)
    assert sorted(noted("score")) == sorted(noted("close")) == [[7], [8], [9], [10]]


def test_an_abandoned_episode_is_closed_without_scores(story: str) -> None:
    with opened(source=story, concurrency=1) as pool:
        pool.load()
        game = Game(pool, "a", seed=1)
        game.play("old")
        pool.abandon("a")
        assert contents(game.play("new")) == ["new"]
        game.send("lost")
        pool.abandon("a")
        assert contents(game.play("newer", is_last=True)) == ["newer"]
    assert noted("score") == [[1]] and noted("close")[:2] == [[1], [1]]


def test_a_worker_runs_steps_concurrently_and_survives_prints_and_forks(story, capfd):
    with opened(source=story) as pool:
        pool.load()
        games = [Game(pool, name) for name in "abc"]
        for game in games:
            game.send("meet")  # this step ends only when all three games have called it
        assert [contents(reply) for reply in take(pool, 3)] == [["meet"]] * 3
        assert contents(games[0].play("scribble")) == ["meet scribble"]
        assert contents(games[1].play("fork")) == ["meet fork"]
        assert contents(games[1].play("on")) == ["meet fork on"]
    assert len(capfd.readouterr().err) < 2 * MAX_PRINTED_BYTES


@pytest.mark.parametrize(
    ("text", "kind", "detail"),
    [
        ("raise", "raised", "step: RuntimeError: out of luck (plug.py:"),
        ("crash", "exit", "step: its process was ended by SIGSEGV"),
        ("full", "memory", "step: MemoryError"),
        ("hang", "timeout", "step: took more than 2 s"),
        ("exit in close", "exit", "step: its process ended with exit code 3"),
        ("nan", "value", "step: returned nan, expected a finite number"),
        ("pipe", "exit", "step: its process sent an invalid answer"),
    ],
)
def test_an_environment_failure_affects_only_its_own_episode(story: str, text: str, kind: str, detail: str) -> None:
    with opened(source=story, step_timeout_s=2 if kind == "timeout" else 60) as pool:
        pool.load()
        sibling, guilty = Game(pool, "a", seed=1), Game(pool, "b", seed=2)
        assert contents(sibling.play("one")) == ["one"]
        failed = guilty.play(text, is_last="close" in text)
        assert failed.failure is not None
        assert (failed.failure.kind, failed.failure.text[: len(detail)]) == (kind, detail)
        assert "\n" not in failed.failure.text
        reply = sibling.play("two", is_last=True)
        assert (contents(reply), reply.reward, reply.scores) == (["one two"], 0.5, {"length": 2})


def test_episodes_of_a_dead_worker_are_replayed_and_count_once(story: str) -> None:
    with opened(source=story) as pool:
        pool.load()
        others = [Game(pool, f"other {n}", seed=n) for n in range(3)]
        before = [game.play("one").reward for game in others]
        game = Game(pool, "game", seed=9)
        replies = [game.play("a"), game.play("die once"), game.play("end")]
        after = [game.play("end") for game in others]
    assert [contents(reply) for reply in replies] == [["a"], ["a die once"], ["a die once end"]]
    assert sum(reply.reward for reply in replies) == 1.5
    assert [contents(reply) for reply in after] == [["one end"]] * 3
    assert before == [0.5] * 3 and [reply.scores for reply in after] == [{"length": 2}] * 3
    assert noted("step").count([9, "a"]) == 2 and noted("step").count([9, "die once"]) == 2
    assert noted("score").count([9]) == 1


@pytest.mark.parametrize(("text", "kind"), [("culprit", "exit"), ("hung culprit", "timeout")])
def test_suspected_episodes_are_retried_alone_and_only_the_one_that_kills_its_worker_fails(
    story: str, text: str, kind: str
) -> None:
    with opened(source=story, step_timeout_s=4 if kind == "timeout" else 60) as pool:
        pool.load()
        games = [Game(pool, name, seed=n) for n, name in enumerate("abc")]
        for game in games:
            game.play("one")
        for game, sent in zip(reversed(games), ["bystander", "bystander", text], strict=True):
            game.send(sent)
        replies = take(pool, 3)
    assert [kind_of(reply) for reply in replies] == [kind, None, None]
    assert [contents(reply) for reply in replies] == [[], ["one bystander"], ["one bystander"]]
    assert noted("step").count([0, text]) == 2


def test_an_episode_fails_if_its_replay_or_opening_differs(story: str) -> None:
    with opened(source=story) as pool:
        pool.load()
        hello, start = [{"role": "user", "content": "hello"}], EpisodeStart(0, {"prompt": "p", "opening": "hello"})
        same, other = Game(pool, "a", opening=hello), Game(pool, "b", opening=[*hello, *hello])
        same.start = other.start = start
        assert same.play("random").failure is None
        differs = Failure("opening", "reset: answered differently for the same seed, row and turns")
        assert other.play("x").failure == differs
        assert kind_of(same.play("die once")) == "replay"


def test_all_steps_of_an_episode_share_one_timeout(story: str) -> None:
    with opened(source=story, episode_timeout_s=0.001) as pool:
        pool.load()
        game = Game(pool, "a")
        replies = [game.play("x")]
        while replies[-1].failure is None:
            replies.append(game.play("x"))
    assert replies[-1].failure == Failure("timeout", "step: its steps took more than 0.001 s together")


def test_episode_openings_are_in_order_and_fail_separately(story: str) -> None:
    with opened(source=story) as pool:
        pool.load()
        good = EpisodeStart(1, {"prompt": "p", "opening": "hello"})
        openings = pool.openings([good, EpisodeStart(2, {}), EpisodeStart(3, {"prompt": "p"}), good])
    hello = [{"role": "user", "content": "hello"}]
    missing = Failure("raised", "reset: TypeError: Story.reset() missing 1 required keyword-only argument: 'prompt'")
    assert openings == [hello, missing, None, hello]
    assert sorted(noted("reset")) == [[1], [1], [3]]


def test_environment_load_errors_name_the_settings() -> None:
    why = "^env.source: calculator and env.tools: gone.py:f: no such file: "
    with opened(source="calculator", tools=["gone.py:f"]) as pool, pytest.raises(InputError, match=why):
        pool.load()


def test_all_environment_calls_fail_if_a_dead_worker_cannot_be_replaced(story: str) -> None:
    with opened(source=story) as pool:
        pool.load()
        game = Game(pool, "a")
        game.play("one")
        Path("plug.py").unlink()
        game.send("exit")
        why = "^env.source: .*:Story: two attempts to start a process have failed: no such file: .*plug.py; .*Fix this"
        for call in (
            lambda: pool.take(None),
            lambda: game.send("two"),
            lambda: pool.end("b", game.start, None),
            lambda: pool.openings([game.start]),
            pool.load,
        ):
            with pytest.raises(RuntimeError, match=why):
                call()
        pool.abandon("a")


def test_a_requested_stop_ends_the_wait_for_openings(story: str) -> None:
    checks = iter([False, False, True])
    with opened(source=story.replace(":Story", ":Endless")) as pool:
        with open("plug.py", "a") as file:
            file.write("\nclass Endless(Story):\n    def reset(self):\n        time.sleep(1000)\n")
        pool.load()
        assert pool.openings([EpisodeStart(0, {})], stop_requested=lambda: next(checks)) is None
        assert list(checks) == []


def test_a_busy_pool_does_not_block_callers_and_wake_ends_one_wait(story: str) -> None:
    with opened(source=story) as pool:
        go_on, waits = threading.Event(), list[bool]()
        pool.on_reply = lambda: waits.append(go_on.wait(DEADLINE_S))
        pool.load()
        for _ in range(2**16 + 1):  # more than the pipe holds
            pool.abandon("a")
        go_on.set()
        pool.wake()
        assert pool.take(None) == []
        assert contents(Game(pool, "a").play("one")) == ["one"] and all(waits)


ASYNC = """
import asyncio, threading
arrived = set()
class Meeting:
    def reset(self):
        self.thread = threading.current_thread().name
    async def step(self, text, calls):
        arrived.add(text)
        while len(arrived) < 4:
            await asyncio.sleep(0)
        if text == "leave": raise SystemExit
        return self.thread
    async def close(self):
        pass
"""


def test_async_environments_share_an_event_loop_that_survives_system_exit(tmp_path: Path) -> None:
    with opened(source=f"{write(tmp_path, ASYNC)}:Meeting") as pool:
        pool.load()
        games = [Game(pool, name) for name in "abcd"]
        for game, text in zip(games, ["leave", "x", "y", "z"], strict=True):
            game.send(text)
        assert [kind_of(reply) for reply in take(pool, 4)] == ["exit", None, None, None]
        # An episode stays in one thread, which is not the thread that reads requests.
        threads = {text for _ in range(3) for text in contents(games[1].play("again"))}
        assert len(threads) == 1 and "MainThread" not in str(threads)
