// The order of what a search finds. Guides come first, then lessons, the reference and the
// project's own pages. A page that explains a whole phrase comes before all others.
const FACTORS = {
  "docs/your-own-script": 1.2,
  "docs/paper": 0.5,
  CHANGELOG: 0.5,
  CONTRIBUTING: 0.5,
};
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 0,
  objPrio: { 0: 0, 1: 0, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, , , , score]) =>
    score * (FACTORS[page] ?? (page.startsWith("docs/reference/") ? 0.9 : 1)),
};
