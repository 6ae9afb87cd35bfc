// The lines between lanes: races, collectives that several ranks run together, and waits of streams.

const MOST_LINES = 300; // of waits and collectives in one drawing. Of more, none is legible.
const RACE = "#d55e00";

class Links {
  constructor(explorer) {
    this.explorer = explorer;
    this.all = explorer.data.links;
    this.races = this.all.filter(link => link.kind === "race");
    this.others = this.all.filter(link => link.kind !== "race");
    this.chosen = null; // a race
  }

  draw(pen) {
    const { view } = this.explorer;
    const seen = this.others.filter(
      ({ ends }) =>
        Math.min(...ends.map(end => end[2])) <= view.until &&
        Math.max(...ends.map(end => end[2])) >= view.from,
    );
    if (seen.length <= MOST_LINES) {
      for (const link of seen) {
        if (link.kind === "wait") this._arrow(pen, ...link.ends);
        else this._together(pen, link.ends);
      }
    }
    for (const race of this.races) this._race(pen, race);
  }

  // A dotted line through the ends that the ranks' spans have in common.
  _together(pen, ends) {
    const rows = ends.map(([row]) => this.explorer.lanes[row]);
    const top = Math.min(...rows.map(lane => lane.top));
    const bottom = Math.max(...rows.map(lane => lane.top + lane.height));
    const x = this.explorer.x(ends[0][2]);
    if (x >= this.explorer.left) pen.line([x, top], [x, bottom], pen.ink, 1, [2, 3]);
  }

  _arrow(pen, [from, , begin], [to, , until]) {
    const points = this._between(from, begin, to, until);
    if (points) pen.arrow(...points, pen.ink, 1);
  }

  // From the edge of one lane to the edge of the other that faces it.
  _between(from, begin, to, until) {
    const { lanes, left } = this.explorer;
    const [source, target] = [lanes[from], lanes[to]];
    const [start, end] = [this.explorer.x(begin), this.explorer.x(until)];
    if (start < left || end < left) return null;
    const down = to > from;
    return [
      [start, source.top + (down ? source.height : 0)],
      [end, target.top + (down ? 0 : target.height)],
    ];
  }

  _race(pen, { number, ends }) {
    const { lanes, left, view } = this.explorer;
    const right = this.explorer.x(view.until);
    const boxes = ends.map(([row, start, end]) => {
      const [from, until] = [this.explorer.x(start), this.explorer.x(end)];
      const near = Math.min(Math.max(from, left), right);
      const box = [near, lanes[row].top, Math.max(Math.min(until, right) - near, 4)];
      return { box, row, there: until >= left && from <= right };
    });
    for (const { box, row, there } of boxes) {
      if (there) pen.outline(...box, lanes[row].height, RACE);
    }
    if (boxes.length < 2 || !boxes.every(({ there }) => there)) return;
    const middle = ({ box }) => box[0] + box[2] / 2;
    const [first, second] = boxes;
    const [source, target] = [lanes[first.row], lanes[second.row]];
    const down = second.row >= first.row;
    const from = [middle(first), source.top + (down ? source.height : 0)];
    const to = [middle(second), target.top + (down ? 0 : target.height)];
    pen.arrow(from, to, RACE, 2.5);
    pen.badge(String(number), (from[0] + to[0]) / 2, (from[1] + to[1]) / 2, RACE);
  }

  // Zooms to a race, and describes it below the timeline.
  show(race) {
    this.chosen = race;
    const start = Math.min(...race.ends.map(end => end[1]));
    const end = Math.max(...race.ends.map(end => end[2]));
    const margin = Math.max(end - start, SHORTEST) / 4;
    this.explorer.choose(null);
    this.explorer.show(start - margin, end + margin);
    this.explorer.describeRows(race.told);
    this.explorer.canvas.scrollIntoView({ block: "nearest" });
  }

  next() {
    if (!this.races.length) return;
    this.show(this.races[(this.races.indexOf(this.chosen) + 1) % this.races.length]);
  }

  // The buttons in the page's list of races.
  offer() {
    for (const button of document.querySelectorAll("button[data-race]")) {
      const race = this.races.find(({ number }) => number === Number(button.dataset.race));
      if (!race) continue;
      button.hidden = false;
      button.addEventListener("click", () => {
        this.show(race);
        this.explorer.canvas.focus({ preventScroll: true });
      });
    }
  }
}
