// Sorts a table by the column whose heading is clicked. The page works without it.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  const original = [...body.rows];
  const key = (row, column) => {
    const cell = row.cells[column];
    const value = parseFloat(cell.dataset.value || cell.textContent);
    return Number.isNaN(value) ? cell.textContent.trim() : value;
  };
  const compare = (a, b) => {
    if (a === "" || b === "") return a === b ? 0 : NaN;
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), undefined, { numeric: true });
  };
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    heading.replaceChildren(button);
    button.addEventListener("click", () => {
      const state = heading.getAttribute("aria-sort");
      const next = { ascending: "descending", descending: null }[state] ?? (state ? null : "ascending");
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      let rows = original;
      if (next) {
        heading.setAttribute("aria-sort", next);
        const sign = next === "ascending" ? 1 : -1;
        rows = [...original].sort((one, two) => {
          const a = key(one, column), b = key(two, column);
          const order = compare(a, b);
          // A row without a value comes last in either direction.
          return Number.isNaN(order) ? (a === "" ? 1 : -1) : sign * order;
        });
      }
      body.append(...rows);
    });
  });
}
