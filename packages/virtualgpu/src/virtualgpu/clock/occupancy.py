"""The occupancy of one GPU: what share of its multiprocessors is taken when."""

from bisect import bisect_right
from math import inf

FULL = 1.0 - 1e-9  # the rest is rounding
MANY = 64  # moments that are kept before past ones are dropped


class Occupancy:
    """The share of one GPU that the kernels queued so far take at every moment to come.

    A kernel fills a share of the GPU: all of it, if it is large. It takes what is free from its start on, and goes on more slowly
    while that is less than its share, as its blocks wait for those of kernels that were queued before. So no share is ever above 1, and
    no kernel queued later delays one queued before.
    """

    __slots__ = ("_taken", "_times")

    def __init__(self) -> None:
        # From each of these moments to the next so much is taken. After the last one nothing is.
        self._times = [0.0]
        self._taken = [0.0]

    def take(self, now: float, start: float, seconds: float, share: float) -> tuple[float, float]:
        """When a kernel starts and ends that could start at `start` and takes `seconds` if its share (above 0, at most 1) is free.

        `now` is the host's time: nothing will ever start before it.
        """
        times, taken = self._times, self._taken
        if not seconds:
            return start, start
        if len(times) > MANY:
            gone = bisect_right(times, now) - 1
            if gone > 0:
                del times[:gone], taken[:gone]
        if start >= times[-1]:
            end = start + seconds
            if start == times[-1] and len(times) > 1 and taken[-2] == share:
                times[-1] = end
            else:
                taken[-1:] = (0.0, share, 0.0) if start > times[-1] else (share, 0.0)
                times[-1:] = (times[-1], start, end) if start > times[-1] else (start, end)
            return start, end
        return self._fit_in(start, seconds, share)

    def _fit_in(self, start: float, seconds: float, share: float) -> tuple[float, float]:
        times, taken = self._times, self._taken
        first = index = max(bisect_right(times, start) - 1, 0)
        moments, shares = [times[index]], [taken[index]]  # what comes in place of those from `first` to `index`
        begin, left, moment = inf, seconds * share, start
        while True:
            until = times[index + 1] if index + 1 < len(times) else inf
            free = 1.0 - taken[index]
            got = 0.0 if taken[index] > FULL else min(share, free)
            end = moment + left / got if got else inf
            if got:
                begin = min(begin, moment)
            _append(moments, shares, moment, taken[index] + got)
            if end <= until:
                if end < until:
                    _append(moments, shares, end, taken[index])
                break
            left -= got * (until - moment)
            moment = until
            index += 1
        if index + 1 < len(times) and shares[-1] == taken[index + 1]:
            index += 1  # the two become one
        times[first : index + 1], taken[first : index + 1] = moments, shares
        return begin, end


def _append(moments: list[float], shares: list[float], moment: float, share: float) -> None:
    if moment == moments[-1]:
        shares[-1] = share
        if len(shares) > 1 and shares[-2] == share:
            del moments[-1], shares[-1]
    elif shares[-1] != share:
        moments.append(moment)
        shares.append(share)
