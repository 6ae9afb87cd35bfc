"""A course of one lesson."""

from virtualgpu import front_end

front_end.register("rowlessons", __file__)
