"""Defines environments for tests as users would write them."""

SOURCE = '''
import random, time
from grpo import StepResult


class Echo:
    """Answers every turn but the third."""

    def reset(self, *, seed, **columns):
        self.turn = 0

    def step(self, text, calls):
        self.turn += 1
        return StepResult("12+3=?", reward=self.turn, terminated=self.turn == 3, metrics={"letters": len(text)})

    def score(self):
        return {"calm": 0.5}


class Slow(Echo):
    def step(self, text, calls):
        time.sleep(0.1 * random.random())
        return super().step(text, calls)


class Shut(Echo):
    """Fails to open a third of all games."""

    def reset(self, *, seed, **columns):
        if seed % 3 == 0:
            raise RuntimeError("there are no dice")
        super().reset(seed=seed)


class Told(Echo):
    """Rewards the only turn with the row's answer."""

    def reset(self, *, answer):
        self.answer = answer

    def step(self, text, calls):
        return StepResult(reward=float(self.answer), terminated=True)


class Unborn(Echo):
    def reset(self, *, seed, **columns):
        time.sleep(3600)


class Asleep(Echo):
    def step(self, text, calls):
        time.sleep(3600)


class Long(Echo):
    def step(self, text, calls):
        return super().step(text, calls)._replace(messages="+".join(["123"] * 10))


class Even(Slow):
    """Rewards turns that end with an even digit."""

    def step(self, text, calls):
        return super().step(text, calls)._replace(reward=float(text[-1:] in ("0", "2", "4", "6", "8")))


class Silent:
    """Grades the first turn and ends."""

    def reset(self, *, answer, **columns):
        self.answer = answer

    def step(self, text, calls):
        return StepResult(reward=float(text == self.answer), terminated=True)


class Game(Silent):
    """Opens with its own problem, and fails in a third of all games."""

    def reset(self, *, seed, **columns):
        self.seed, self.answer = seed, str(seed % 7 + 2)
        return f"{seed % 7}+2=?"

    def step(self, text, calls):
        if self.seed % 3 == 0:
            raise RuntimeError("the dice are lost")
        return super().step(text, calls)
'''
