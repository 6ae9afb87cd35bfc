"""The occupancy of one GPU: which share of its multiprocessors is in use at which time."""

from bisect import bisect_right
from math import inf

FULL = 1.0 - 1e-9  # larger shares differ from 1 only by rounding
MANY = 64  # number of times from which on past ones are dropped


class Occupancy:
    """The share of one GPU that the queued kernels use, at every time from now on.

    A kernel asks for a share of the GPU. A large kernel asks for all of it. From its start on the
    kernel uses what is free. It runs more slowly while less than its share is free, because its
    blocks wait for those of earlier kernels. No share is therefore above 1, and no kernel delays
    one that was queued before it.
    """

    __slots__ = ("_taken", "_times")

    def __init__(self) -> None:
        # taken[i] is the share in use from times[i] to times[i + 1]. After the last time it is 0.
        self._times = [0.0]
        self._taken = [0.0]

    def take(self, now: float, start: float, seconds: float, share: float) -> tuple[float, float]:
        """Return when a kernel starts and ends, and note the share that it uses.

        The kernel can start at `start`. It takes `seconds` if its share (above 0, at most 1) is
        free. `now` is the host's time. No later kernel starts before it.
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
            elif start > times[-1]:
                taken[-1:] = (0.0, share, 0.0)
                times[-1:] = (times[-1], start, end)
            else:
                taken[-1:] = (share, 0.0)
                times[-1:] = (start, end)
            return start, end
        return self._fit_in(start, seconds, share)

    def _fit_in(self, start: float, seconds: float, share: float) -> tuple[float, float]:
        """Return (start, end) of a kernel that runs beside the kernels queued before it.

        It can start at `start`, and takes `seconds` if its share of the GPU is free.
        """
        times, taken = self._times, self._taken
        first = index = max(bisect_right(times, start) - 1, 0)
        new_times, new_taken = [times[index]], [taken[index]]  # these replace first to index
        begin = inf
        left = seconds * share  # work that is not done yet, in seconds of the whole GPU
        time = start
        while True:
            until = inf
            if index + 1 < len(times):
                until = times[index + 1]
            used = 0.0  # the share that the kernel gets from `time` to `until`
            end = inf
            if taken[index] <= FULL:
                used = min(share, 1.0 - taken[index])
                end = time + left / used
                begin = min(begin, time)
            _append(new_times, new_taken, time, taken[index] + used)
            if end <= until:
                if end < until:
                    _append(new_times, new_taken, end, taken[index])
                break
            left -= used * (until - time)
            time = until
            index += 1
        if index + 1 < len(times) and new_taken[-1] == taken[index + 1]:
            index += 1  # merge two neighbours with the same share
        times[first : index + 1] = new_times
        taken[first : index + 1] = new_taken
        return begin, end


def _append(times: list[float], taken: list[float], time: float, share: float) -> None:
    """Append to two parallel lists that `share` of the GPU is in use from `time` on.

    `times` has the moments of change, and `taken` the shares from then on. A share equal to the one
    before it is merged with it.
    """
    if time == times[-1]:
        taken[-1] = share
        if len(taken) > 1 and taken[-2] == share:
            del times[-1], taken[-1]
    elif taken[-1] != share:
        times.append(time)
        taken.append(share)
