// What the theme leaves out for who uses a keyboard or a screen reader: what scrolls can be reached, and each part of the page has a name.
// Where scripts run, what can be looked into stands in place of its picture.
addEventListener("DOMContentLoaded", () => {
  const all = (selector, change) => document.querySelectorAll(selector).forEach(change);
  all("pre, .table-wrapper", (part) => { part.tabIndex = 0; });
  all("p.caption[role=heading]", (caption) => { caption.ariaLevel = "2"; });
  all(".sidebar-drawer", (part) => { part.ariaLabel = "Contents"; });
  all(".toc-drawer", (part) => { part.ariaLabel = "On this page"; });
  all("iframe[hidden]", (frame) => { frame.hidden = false; });
  all("details.picture", (picture) => { picture.open = false; });
  all(".content-icon-container", (part) => { part.role = "region"; part.ariaLabel = "This page"; });
});
