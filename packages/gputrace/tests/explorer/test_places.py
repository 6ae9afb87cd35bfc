"""Places of blocks are the same in every run, and no two blocks have one place at the same time."""

from gputrace.explorer.places import Places

MIB = 1 << 20


def rows(first, second, third=500):
    """Return the rows of two segments with a block each, at the addresses `first` and `second`.

    The first segment is freed, and another one of its size is allocated at `third`. Addresses are
    in MiB.
    """
    return [
        (0.0, "segment_alloc", first, 20),
        (0.1, "alloc", first + 4, 6),
        (0.2, "segment_alloc", second, 2),
        (0.3, "alloc", second, 2),
        (0.4, "free_requested", first + 4, 6),
        (0.4, "free_completed", first + 4, 6),
        (0.5, "segment_free", first, 20),
        (0.6, "segment_alloc", third, 20),
        (0.7, "alloc", third + 8, 8),
    ]


def test_places_do_not_depend_on_addresses(trace_of):
    for addresses in ((100, 500, 300), (500, 100, 500), (100, 120, 102)):
        places = Places(trace_of(rows(*addresses)), 0)
        assert list(places.of_event.values()) == [4 * MIB, 20 * MIB, 8 * MIB], addresses
        assert places.bytes == 22 * MIB


def test_a_segment_that_grows_stays_in_one_piece(trace_of):
    grows = [
        (0.0, "segment_map", 100, 20),
        (0.1, "segment_alloc", 500, 2),
        (0.2, "segment_map", 120, 20),
        (0.3, "alloc", 110, 25),
        (0.4, "alloc", 500, 1),
    ]
    places = Places(trace_of(grows), 0)
    assert list(places.of_event.values()) == [10 * MIB, 40 * MIB] and places.bytes == 42 * MIB


def test_blocks_whose_segment_is_not_known_have_a_place_too(trace_of):
    places = Places(trace_of([(0.0, "alloc", 100, 2), (0.1, "alloc", 300, 4)], lost=3), 0)
    assert list(places.of_event.values()) == [0, 2 * MIB] and places.bytes == 6 * MIB
