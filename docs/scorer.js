// The order of what a search finds: pages before names of the reference that only contain the word, the project's own pages last.
var Scorer = {
  objNameMatch: 11, objPartialMatch: 0, objPrio: { 0: 0, 1: 0, 2: -5 }, objPrioDefault: 0, title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([page, , , , score]) => ["CHANGELOG", "CONTRIBUTING", "docs/paper"].includes(page) ? score / 2 : score,
};
