// The order of what a search finds: the guide to one's own script, other explanations, the reference
// and its names, the project's own pages.
var Scorer = {
  objNameMatch: 11, objPartialMatch: 0, objPrio: { 0: 0, 1: 0, 2: -5 }, objPrioDefault: 0, title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([page, , , , score]) => score * ({ "docs/your-own-script": 1.2, "docs/reference": 0.9, "docs/paper": 0.5, CHANGELOG: 0.5, CONTRIBUTING: 0.5 }[page] ?? 1),
};
