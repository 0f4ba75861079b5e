"""Tests of episodes in processes: what hangs, dies or lies costs its own episode, and the others never notice."""

from __future__ import annotations

import json
import queue
import threading
import time
from pathlib import Path

import pytest

from app.environments.episode_pool import EpisodeReply, EpisodeStart
from app.plugins.values import Failure
from app.plugins.worker_process import MAX_PRINTED_BYTES
from settings.errors import InputError
from tests.environments.pools import WAIT_S, Game, contents, opened, take, write
from tests.reward.processes import WORKERS

pytestmark = WORKERS

STORY = """
    import contextlib, ctypes, json, os, sys, threading, time
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
            if text == "hang once" and not os.path.exists("hung"):
                open("hung", "w").close()
                time.sleep(1000)
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
            if text == "time bomb": threading.Timer(0.3, os._exit, [3]).start()
            if text == "meet": barrier.wait(60)
            if text == "raise": raise RuntimeError("out of luck")
            if text == "leave": sys.exit(1)
            if text == "exit": os._exit(3)
            if text == "crash": ctypes.string_at(0)
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
            if self.told[-1:] == ["hang in close"]: time.sleep(1000)
            if self.told[-1:] == ["exit in close"]: os._exit(3)
"""


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return f"{write(tmp_path, STORY)}:Story"


def kind_of(reply: EpisodeReply) -> str | None:
    return reply.failure and reply.failure.kind


def noted(what: str) -> list[list[object]]:
    lines = map(json.loads, Path("log").read_text().splitlines())
    return [rest for word, *rest in lines if word == what]


def test_an_episode_is_scored_and_closed_once(story: str) -> None:
    with opened(source=story, concurrency=1) as pool:
        assert pool.load()["tools"] == []
        game = Game(pool, "q/s0", seed=7)
        first, last = game.play("once"), game.play("end")
    assert (contents(first), first.reward, first.terminated, first.metrics) == (["once"], 0.5, False, {"told": 1})
    assert (contents(last), last.terminated, first.scores, last.scores) == (["once end"], True, {}, {"length": 2})
    assert (noted("score"), noted("close")) == ([[7]], [[7]])


def test_the_last_turn_allowed_ends_the_episode(story: str) -> None:
    with opened(source=story) as pool:
        pool.load()
        reply = Game(pool, "q/s0").play("a", is_last=True)
    assert (reply.terminated, reply.scores) == (False, {"length": 1})


def test_an_episode_can_end_without_its_last_turn_or_without_any(story: str) -> None:
    with opened(source=story) as pool:
        pool.load()
        played, unplayed = Game(pool, "a"), Game(pool, "b")
        played.play("one")
        for game in (played, unplayed):
            pool.end(game.key, game.start, game.opening)
        first, second = take(pool, 2)
    assert (first.scores, second.scores) == ({"length": 1}, {"length": 0})
    assert (first.messages, first.reward) == ([], 0.0)


def test_an_abandoned_episode_is_closed_without_scores_and_its_key_can_be_used_again(story: str) -> None:
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


def test_steps_of_a_worker_run_at_once(story: str) -> None:
    with opened(source=story) as pool:
        pool.load()
        for name in "abc":
            Game(pool, name).send("meet")  # returns once three are there
        assert [contents(reply) for reply in take(pool, 3)] == [["meet"]] * 3


@pytest.mark.parametrize(
    ("text", "kind", "detail"),
    [
        ("raise", "raised", "step: RuntimeError: out of luck (plug.py:"),
        ("leave", "exit", "step: SystemExit: 1 (plug.py:"),
        ("exit", "exit", "step: its process ended with exit code 3"),
        ("crash", "exit", "step: its process was ended by SIGSEGV"),
        ("full", "memory", "step: MemoryError"),
        ("hang", "timeout", "step: took more than 2 s"),
        ("hang in close", "timeout", "step: took more than 2 s"),
        ("exit in close", "exit", "step: its process ended with exit code 3"),
        ("nan", "value", "step: returned nan, expected a finite number"),
        ("pipe", "exit", "step: its process sent an invalid answer"),
    ],
)
def test_a_fault_costs_only_its_own_episode(story: str, text: str, kind: str, detail: str) -> None:
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


def test_what_is_printed_harms_nothing(story: str, capfd: pytest.CaptureFixture[str]) -> None:
    with opened(source=story) as pool:
        pool.load()
        assert contents(Game(pool, "a").play("scribble")) == ["scribble"]
    assert len(capfd.readouterr().err) < 2 * MAX_PRINTED_BYTES


def test_a_forked_child_answers_nothing(story: str) -> None:
    with opened(source=story) as pool:
        pool.load()
        game = Game(pool, "a")
        assert contents(game.play("fork")) == ["fork"]
        assert contents(game.play("on")) == ["fork on"]


def test_an_episode_is_played_again_after_the_death_of_its_worker_and_counts_once(story: str) -> None:
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
def test_a_suspect_runs_alone_and_only_the_guilty_fail(story: str, text: str, kind: str) -> None:
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


def test_an_episode_whose_process_always_dies_later_is_lost_in_the_end(story: str) -> None:
    with opened(source=story) as pool:
        pool.load()
        game = Game(pool, "a")
        game.play("time bomb")
        while len(noted("reset")) <= 1:  # its process is idle, and dies again and again
            time.sleep(0.05)
        while not (reply := game.play("on")).failure:
            time.sleep(0.05)
        assert reply.failure.kind == "exit"
        assert contents(Game(pool, "b").play("on")) == ["on"]


def test_a_replay_that_differs_is_a_failure(story: str) -> None:
    with opened(source=story) as pool:
        pool.load()
        game = Game(pool, "a")
        game.play("random")
        died = game.play("die once")
    assert kind_of(died) == "replay"


def test_all_steps_together_may_take_only_so_long(story: str) -> None:
    with opened(source=story, episode_timeout_s=0.001) as pool:
        pool.load()
        game = Game(pool, "a")
        replies = [game.play("x")]
        while replies[-1].failure is None:
            replies.append(game.play("x"))
    assert replies[-1].failure == Failure("timeout", "step: its steps took more than 0.001 s together")


def test_openings_come_in_order_and_a_fault_costs_its_own(story: str) -> None:
    with opened(source=story) as pool:
        pool.load()
        good = EpisodeStart(1, {"prompt": "p", "opening": "hello"})
        openings = pool.openings([good, EpisodeStart(2, {}), EpisodeStart(3, {"prompt": "p"}), good])
    hello = [{"role": "user", "content": "hello"}]
    missing = Failure("raised", "reset: TypeError: Story.reset() missing 1 required keyword-only argument: 'prompt'")
    assert openings == [hello, missing, None, hello]
    assert sorted(noted("reset")) == [[1], [1], [3]]


def test_siblings_must_get_the_same_opening(story: str) -> None:
    with opened(source=story) as pool:
        pool.load()
        hello = [{"role": "user", "content": "hello"}]
        start = EpisodeStart(0, {"prompt": "p", "opening": "hello"})
        same, other = Game(pool, "a", opening=hello), Game(pool, "b", opening=[*hello, *hello])
        same.start = other.start = start
        assert same.play("x").failure is None
        other = other.play("x")
    assert other.failure == Failure("opening", "reset: gave another answer for the same seed, row and turns")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "plug.py has no `E`; its functions: none"),
        ("E = 1", "plug.py:E is int 1, not a class or a function that makes an environment"),
        ("class E: pass", "is not an environment, which has `reset` and `step`"),
        ("class E:\n    def __init__(self, size): pass", r"TypeError: E.__init__\(\) missing 1 required"),
        ("import sys\nclass E:\n    def __init__(self): sys.exit(5)", r"SystemExit: 5 \(.*plug.py:3\)"),
    ],
)
def test_what_is_no_environment_is_refused(tmp_path: Path, source: str, message: str) -> None:
    path = write(tmp_path, source)
    with (
        opened(source=f"{path}:E", memory_mib=512) as pool,
        pytest.raises(InputError, match=f"^env.source: {path}:E: .*{message}"),
    ):
        pool.load()


def test_messages_name_the_settings_of_what_cannot_be_loaded() -> None:
    with opened(tools=["calculator", "gone.py:f"]) as pool, pytest.raises(InputError) as refusal:
        pool.load()
    assert str(refusal.value).startswith("env.tools: calculator, gone.py:f: no such file: ")
    with opened(source="calculator", tools=["gone.py:f"]) as pool, pytest.raises(InputError) as refusal:
        pool.load()
    assert str(refusal.value).startswith("env.source: calculator and env.tools: gone.py:f: no such file: ")


def test_after_a_worker_that_cannot_be_replaced_all_calls_say_why_and_none_waits(story: str) -> None:
    with opened(source=story) as pool:
        pool.load()
        game = Game(pool, "a")
        game.play("one")
        Path("plug.py").unlink()
        game.send("exit")
        why = "^env.source: .*:Story: two attempts to start a process have failed: no such file: .*plug.py; mend that"
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


FLAKY = """
import os, time
for name in "ab":  # the first two processes, once both are there
    try:
        os.mkdir(name)
    except FileExistsError:
        continue
    while not os.path.exists("b"):
        time.sleep(0.01)
    os._exit(4)
class Flaky:
    def reset(self, *, seed):
        return str(seed)
    def step(self, text, calls):
        return text
"""


def test_first_starts_in_the_middle_of_a_run_are_tried_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with opened(source=f"{write(tmp_path, FLAKY)}:Flaky", workers=2) as pool:
        openings = pool.openings([EpisodeStart(seed, {}) for seed in range(3)])
    assert openings == [[{"role": "user", "content": str(seed)}] for seed in range(3)]
    with (
        opened(source="gone.py:E") as pool,
        pytest.raises(RuntimeError, match=r"^env.source: gone.py:E: two attempts to start a process have failed: no "),
    ):
        pool.openings([EpisodeStart(0, {})])


def test_a_stop_ends_the_wait_for_openings(story: str) -> None:
    checks = iter([False, False, True])
    with opened(source=story.replace(":Story", ":Endless")) as pool:
        with open("plug.py", "a") as file:
            file.write("\nclass Endless(Story):\n    def reset(self):\n        time.sleep(1000)\n")
        pool.load()
        assert pool.openings([EpisodeStart(0, {})], stop_requested=lambda: next(checks)) is None
        assert list(checks) == []


def test_a_wake_ends_one_wait_for_replies(story: str) -> None:
    told: queue.SimpleQueue[object] = queue.SimpleQueue()
    with opened(source=story) as pool:
        pool.load()
        waiting = threading.Thread(target=lambda: told.put(pool.take(None)), daemon=True)
        waiting.start()
        pool.wake()
        assert told.get(timeout=WAIT_S) == []
        assert contents(Game(pool, "a").play("one")) == ["one"]


def test_callers_do_not_wait_for_a_busy_pool(story: str) -> None:
    with opened(source=story) as pool:
        go_on, waits = threading.Event(), list[bool]()
        pool.on_reply = lambda: waits.append(go_on.wait(WAIT_S))
        pool.load()
        for _ in range(2**16 + 1):  # more than the pipe holds
            pool.abandon("a")
        go_on.set()
        assert contents(Game(pool, "a").play("one")) == ["one"] and all(waits)


def test_closing_ends_the_wait_for_a_reply(story: str) -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def wait() -> None:
        with pytest.raises(RuntimeError) as ended:
            pool.take(None)
        told.put(str(ended.value))

    with opened(source=story) as pool:
        pool.load()
        threading.Thread(target=wait, daemon=True).start()
    assert told.get(timeout=WAIT_S).endswith("its processes have been closed")


ASYNC = """
import asyncio, threading
arrived = set()
class Meeting:
    async def reset(self):
        return None
    async def step(self, text, calls):
        arrived.add(text)
        while len(arrived) < 4:
            await asyncio.sleep(0)
        if text == "leave": raise SystemExit
        return f"{threading.current_thread().name == 'MainThread'}"
    async def close(self):
        pass
"""


def test_coroutines_share_a_loop_which_outlives_an_exit(tmp_path: Path) -> None:
    with opened(source=f"{write(tmp_path, ASYNC)}:Meeting") as pool:
        pool.load()
        games = [Game(pool, name) for name in "abcd"]
        for game, text in zip(games, ["leave", "x", "y", "z"], strict=True):
            game.send(text)
        assert [kind_of(reply) for reply in take(pool, 4)] == ["exit", None, None, None]
        assert contents(games[1].play("again")) == ["False"]


STICKY = """
import threading
class Sticky:
    def reset(self):
        self.thread = threading.get_ident()
    def step(self, text, calls):
        return str(self.thread == threading.get_ident())
"""


def test_an_episode_stays_in_its_thread(tmp_path: Path) -> None:
    with opened(source=f"{write(tmp_path, STICKY)}:Sticky") as pool:
        pool.load()
        game = Game(pool, "a")
        assert [contents(game.play("x")) for _ in range(3)] == [["True"]] * 3
