// The tables "line by line" in the page around an explorer. Each line leads to the blocks that it
// made, and a chosen block leads to its line.

class LineTables {
  constructor(explorer) {
    this.explorer = explorer;
    this.rows = []; // { lane, lines, button }
    for (const table of document.querySelectorAll(".lines[data-device]")) {
      const lane = explorer.lanes.find(
        lane => lane instanceof Blocks && lane.device === Number(table.dataset.device),
      );
      for (const row of table.querySelectorAll("tbody tr"))
        this._link(lane, row.cells[0], row.cells[row.cells.length - 1].textContent);
    }
  }

  _link(lane, cell, text) {
    const place = cell.textContent,
      lines = [...this.explorer.data.lines.keys()].filter(number => {
        const [location, , source] = this.explorer.data.lines[number];
        return location === place && source === text;
      });
    const blocks = lines.flatMap(line => lane.made.get(line)?.blocks ?? []);
    if (!blocks.length) return; // it freed only
    const largest = blocks.reduce((best, index) =>
      lane.size[index] > lane.size[best] ? index : best,
    );
    const button = make(
      (cell.replaceChildren(), cell),
      "button",
      { type: "button", className: "to-blocks", textContent: place },
      { title: "Show the largest block that it made" },
    );
    button.addEventListener("click", () => {
      this.explorer.choose(lane, largest);
      this.explorer.canvas.focus({ preventScroll: true });
    });
    this.rows.push({ lane, lines, button });
  }

  // What leads to the line of something chosen: the table of its own device, if it is a block.
  buttonFor({ lane, index }) {
    const line = this.explorer.data.users[lane.stack[index]],
      rows = this.rows.filter(({ lines }) => lines.includes(line));
    return (rows.find(row => row.lane === lane) ?? rows[0])?.button;
  }
}
