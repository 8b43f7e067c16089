// A click on a heading sorts each body of its table by that column; rows without a rank stay in their own.
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const heading = button.closest("th"), table = button.closest("table");
    const column = heading.cellIndex, numeric = heading.classList.contains("num");
    const before = heading.getAttribute("aria-sort");
    const next = before ? (before === "ascending" ? "descending" : "ascending") : numeric && column ? "descending" : "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", next);
    const sign = next === "ascending" ? 1 : -1;
    const value = row => {
      const text = row.cells[column].textContent.trim();
      return numeric ? parseFloat(text) : text.toLowerCase();
    };
    for (const body of table.tBodies) {
      const rows = [...body.rows].sort((a, b) => {
        const x = value(a), y = value(b);
        // What was not measured goes last, whichever way.
        if (numeric && (isNaN(x) || isNaN(y))) return isNaN(x) - isNaN(y);
        return x < y ? -sign : x > y ? sign : 0;
      });
      body.append(...rows);
    }
  });
}
