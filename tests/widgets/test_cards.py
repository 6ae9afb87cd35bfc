"""What the monitor's tables and curves say."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser

from labkit.experiments.readings import GpuReading, Look
from labkit.widgets.cards import STYLE, cards

MIB = 1 << 20
H200 = GpuReading(0, "NVIDIA H200", False, 512 * MIB, 1024 * MIB, 0.5, 175.4, 700.0, 36)


def looks(*gpus: GpuReading, seconds: float = 0.5) -> tuple[Look, ...]:
    """One look after the other at a single GPU."""
    return tuple(Look(place * seconds, (gpu,)) for place, gpu in enumerate(gpus))


def rows(html: str) -> dict[str, list[str]]:
    """The text of each row's cells, by its header."""
    table = ElementTree.fromstring(html[html.index("<table>") : html.index("</table>") + 8])
    return {row.find("th").text: [cell.text for cell in row.findall("td")] for row in table.findall("tbody/tr")}


def curves(html: str) -> list[list[str]]:
    """The points of each line, row by row."""
    table = ElementTree.fromstring(html[html.index("<table>") : html.index("</table>") + 8])
    return [[line.get("points") for line in svg.findall("polyline")] for svg in table.iter("svg")]


def test_each_figure_with_its_unit_and_its_scale():
    assert rows(cards(looks(H200))) == {
        "memory": ["512 MiB", None, "512 MiB"],
        "utilization": ["50 %", None, "100 %"],
        "power": ["175 W", None, "700 W"],
        "temperature": ["36 °C", None, "100 °C"],
    }


def test_what_a_gpu_does_not_offer_is_no_zero():
    html = cards(looks(replace(H200, utilization=None, watts=None, celsius=None)))
    assert rows(html)["power"] == rows(html)["utilization"] == rows(html)["temperature"] == ["not offered by this GPU"]
    assert " W" not in html


def test_what_a_virtual_gpu_does_not_model_is_said():
    html = cards(looks(GpuReading(0, "Tesla T4", True, 0, 1024 * MIB, 0.0)))
    assert rows(html)["power"] == rows(html)["temperature"] == ["not modelled"]
    assert rows(html)["utilization"] == ["0 %", None, "100 %"]
    assert "virtual GPU, modelled on NVIDIA Tesla T4" in html
    assert "for which work is queued" in html
    assert "measured" not in html


def test_measured_figures_say_where():
    assert "measured on NVIDIA H200" in cards(looks(H200))
    both = Look(0.0, (H200, replace(H200, index=1), replace(H200, index=2, name="NVIDIA T4")))
    assert "measured on NVIDIA H200, measured on NVIDIA T4" in cards((both,))


def test_without_a_known_limit_the_curve_ends_at_the_largest_value():
    assert rows(cards(looks(replace(H200, watts=300.0, watts_limit=None), replace(H200, watts_limit=None))))["power"][2] == "300 W"


def test_the_curve_of_the_memory_ends_at_a_power_of_two_and_never_above_all_memory():
    for used, top in ((0, "1 MiB"), (300 * MIB, "512 MiB"), (512 * MIB + 1, "1 GiB"), (1400 * MIB, "1.465 GiB")):
        gpu = replace(H200, used=used, total=1500 * MIB)
        assert rows(cards(looks(gpu)))["memory"][2] == top
    assert rows(cards(looks(replace(H200, used=3 * MIB, total=None))))["memory"][2] == "4 MiB"


def test_curves_rise_from_left_to_right():
    rising = replace(H200, used=0), H200, replace(H200, used=1024 * MIB)
    assert curves(cards(looks(*rising, seconds=2)))[0] == ["112,22 116,11 120,0"]
    assert curves(cards(looks(*rising, seconds=15)))[0] == ["60,22", "90,11", "120,0"]  # too far apart to be joined


def test_more_than_the_scale_stays_inside():
    assert curves(cards(looks(replace(H200, watts=900.0))))[2] == ["120,0"]


def test_a_curve_is_broken_where_nothing_was_seen():
    unknown = replace(H200, utilization=None)
    utilization = curves(cards(looks(H200, H200, unknown, H200, H200)))[1]
    assert len(utilization) == 2
    late = (*looks(H200, H200), Look(20.0, (H200,)), Look(20.5, (H200,)))
    assert len(curves(cards(late))[0]) == 2


def test_what_rests_is_drawn_the_same_again():
    """A level curve that fills the minute does not change, so nothing is sent."""
    minute = looks(*[H200] * 150)
    assert cards(minute[:140]) == cards(minute[5:145])
    assert len(cards(minute)) < 2000


def test_a_busy_minute_of_eight_gpus_is_small():
    seen = tuple(
        Look(place / 2, tuple(replace(H200, index=n, used=place * n * MIB, utilization=place % 7 / 7) for n in range(8)))
        for place in range(121)
    )
    assert len(cards(seen)) < 20_000


def test_a_lost_gpu_says_why_beside_the_others():
    html = cards((Look(0.0, (H200, GpuReading(1, "NVIDIA H200", trouble="NVML failed: GPU is <lost>"))),))
    assert "GPU 1: NVIDIA H200" in html
    assert "no figures: NVML failed: GPU is &lt;lost&gt;" in html
    assert "512 MiB" in html
    assert "measured" not in cards((Look(0.0, (GpuReading(0, "unknown", trouble="lost"),)),))


def test_no_gpu_no_cards():
    assert cards(()) == cards((Look(0.0, trouble="no driver"),)) == ""


def test_it_can_be_read_aloud():
    html = cards(looks(replace(H200, used=0), H200))
    assert "<caption>GPU 0: NVIDIA H200, 1 GiB</caption>" in html
    assert html.count('<th scope="row">') == html.count('role="img"') == 4
    assert html.count('<th scope="col">') == 4
    assert 'aria-label="memory of GPU 0: 0 B to 512 MiB in the last 60 s"' in html


def test_every_tag_is_closed():
    class Tags(HTMLParser):
        depth = 0

        def handle_starttag(self, tag, attributes):
            self.depth += 1

        def handle_endtag(self, tag):
            self.depth -= 1

    tags = Tags()
    tags.feed(STYLE + cards(looks(H200)))
    assert tags.depth == 0
