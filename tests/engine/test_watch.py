"""What a watch tells of requests, and when it tells nothing."""

from engine.loop import Ticket
from engine.request import Output, Progress, Request, Row
from engine.watch import Moment, Watch


def ticket(number=7, num_tokens=4):
    request = Request("r", (1,) * num_tokens, choice=1)
    taken = Ticket(request, lambda event: None, number, 10.0)
    taken.row = Row(request, 10, 0, None, num_cached=2)
    return taken


def listened():
    told: list[list[Moment]] = []
    watch = Watch()
    watch.listener = lambda moments: told.append(list(moments))
    return watch, told


def test_all_that_came_of_a_tick_is_told_at_once():
    watch, told = listened()
    one, other = ticket(), ticket(8)
    other.times.token_s = 1.0
    one.row.output.append(5)
    watch.ran(
        [(one, Progress(one.row, 3, 4)), (one, Output(one.row, 5, "a")), (other, Output(other.row, 5, "a"))],
        [other],
        12.0,
    )
    [moments] = told
    assert [(moment.stage, moment.task) for moment in moments] == [
        ("preempted", 8),
        ("piece", 7),
        ("first_token", 7),
    ]
    assert moments[1] == Moment("piece", 7, "r", 1, 12.0, 4, stored_tokens=3, cached_tokens=2, new_tokens=1)


def test_several_tokens_of_one_step_hold_one_that_is_the_first():
    watch, told = listened()
    one = ticket()
    watch.ran([(one, Output(one.row, 5, "a")), (one, Output(one.row, 6, "b"))], (), 12.0)
    assert [moment.stage for moment in told[0]] == ["first_token"]


def test_what_says_nothing_is_not_told():
    watch, told = listened()
    one = ticket()
    one.times.token_s = 1.0
    watch.ran([(one, Output(one.row, 5, "a"))], (), 12.0)
    watch.started([], 12.0)
    assert told == []


def test_a_request_without_a_row_has_its_stages_too():
    watch, told = listened()
    one = ticket()
    one.row = None
    watch.queued(one, 10.0)
    watch.ended(one, "refused", 11.0)
    assert [moments[0] for moments in told] == [
        Moment("queued", 7, "r", 1, 10.0, 4),
        Moment("ended", 7, "r", 1, 11.0, 4, outcome="refused"),
    ]


def test_nobody_listens_and_nothing_is_looked_at():
    watch, nothing = Watch(), object()
    watch.queued(nothing, 1.0)
    watch.started([nothing], 1.0)
    watch.ran([nothing], [nothing], 1.0)
    watch.ended(nothing, "stop", 1.0)
