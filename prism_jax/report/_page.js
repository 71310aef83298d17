// Each header of a table becomes a button that sorts its rows: up, then down.
"use strict";
const inWords = new Intl.Collator("en", { numeric: true });

function keyOf(row, column) {
  const cell = row.cells[column];
  const value = cell.dataset.value;
  if (value === undefined) return cell.textContent.trim();
  return value === "" ? null : Number(value);
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return inWords.compare(a, b);
}

function sort(table, column) {
  const headers = [...table.tHead.rows[0].cells];
  const rises = headers[column].getAttribute("aria-sort") !== "ascending";
  headers.forEach((header) => header.removeAttribute("aria-sort"));
  headers[column].setAttribute("aria-sort", rises ? "ascending" : "descending");
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => [keyOf(row, column), row]);
  rows.sort(([a], [b]) => {
    // What is not known is last either way.
    if (a === null || b === null) return (a === null) - (b === null);
    return rises ? compare(a, b) : compare(b, a);
  });
  rows.forEach(([, row]) => body.append(row));
}

for (const table of document.querySelectorAll("table")) {
  if (table.tBodies[0].rows.length < 2) continue;
  [...table.tHead.rows[0].cells].forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = header.textContent;
    button.addEventListener("click", () => sort(table, column));
    header.replaceChildren(button);
  });
}

addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
