from app.rollout.scheduling.priority_queue import PriorityQueue


def queue_of(*items: tuple[str, float, int]) -> PriorityQueue:
    queue = PriorityQueue()
    for item in items:
        queue.put(*item)
    return queue


def taken_from(queue: PriorityQueue) -> list[str]:
    taken = []
    while (uid := queue.peek()) is not None:
        queue.remove(uid)
        taken.append(uid)
    return taken


def test_the_smallest_rank_comes_first_and_then_the_smallest_number() -> None:
    queue = queue_of(("late", 1, 0), ("second", 0, 7), ("first", 0, 2))
    assert taken_from(queue) == ["first", "second", "late"]


def test_a_sample_can_be_given_another_place() -> None:
    queue = queue_of(("a", 0, 0), ("b", 1, 1))
    queue.put("a", 2, 0)
    assert queue.uids() == ["b", "a"]
    assert taken_from(queue) == ["b", "a"]


def test_a_removed_sample_is_not_taken() -> None:
    queue = queue_of(("a", 0, 0), ("b", 1, 1))
    queue.remove("a")
    queue.remove("a")
    assert (queue.uids(), len(queue), queue.peek()) == (["b"], 1, "b")
