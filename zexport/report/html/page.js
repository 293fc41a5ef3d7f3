
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const table = byId("tensors"), body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const SHOWN = 400;

  const names = data.pattern.map((pattern, row) => {
    const holes = data.numbers[row].split(",");
    return data.patterns[pattern].split("\u0001").map((part, i) => (i ? holes[i - 1] : "") + part).join("");
  });
  const cell = (column, row) => data.columns[column].values[data.columns[column].index[row]];
  const text = names.map((name, row) => [name, ...data.columns.map((_, c) => cell(c, row))].join(" ").toLowerCase());
  let order = names.map((_, row) => row), chosen = -1, sorted = null;

  const element = (kind, content, style) => {
    const made = document.createElement(kind);
    if (content !== undefined) made.textContent = content;
    if (style) made.className = style;
    return made;
  };

  // The table shows a few hundred rows; the filter finds the others.
  const columns = [...table.tHead.rows[0].cells];
  const row = (number) => {
    const line = element("tr", undefined, number === chosen ? "chosen" : "");
    const first = element("td");
    first.append(element("i", undefined, "c" + data.colors[number]), names[number]);
    line.append(first);
    data.columns.forEach((_, c) => line.append(element("td", cell(c, number), columns[c + 1].className)));
    line.addEventListener("click", () => open(number));
    return line;
  };
  const fill = () => {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = order.filter((number) => words.every((word) => text[number].includes(word)));
    body.replaceChildren(...found.slice(0, SHOWN).map(row));
    const more = found.length > SHOWN ? `, the first ${SHOWN} shown` : "";
    byId("count").textContent = `${found.length.toLocaleString("en")} of ${names.length.toLocaleString("en")}${more}`;
  };
  const sort = (column) => {
    const down = sorted === column;
    sorted = down ? null : column;
    const value = (number) => (column ? cell(column - 1, number) : names[number]);
    const numeric = columns[column].classList.contains("number");
    const amount = (number) => { const n = parseFloat(value(number).replaceAll(",", "")); return isNaN(n) ? -Infinity : n; };
    order.sort(numeric ? (a, b) => amount(b) - amount(a)
      : (a, b) => value(a).localeCompare(value(b), "en", { numeric: true }));
    if (down) order.reverse();
    fill();
  };
  columns.forEach((head, column) => head.addEventListener("click", () => sort(column)));

  // One tensor: its cells, and the byte ranges in rank files.
  const places = (number) => {
    const found = [];
    (data.strips ?? []).forEach(([file, offset, cut]) => {
      const pieces = data.cuts[cut];
      for (let i = 0, at = 0; i < pieces.length; at += pieces[i + 3], i += 4) {
        const [, first, last, nbytes] = pieces.slice(i, i + 4);
        const rows = [];
        for (let tensor = first; tensor >= 0 && tensor <= last; tensor++) rows.push(data.rowOf[tensor]);
        if (rows.includes(number)) found.push(place(file, offset, at, nbytes, last - first + 1));
      }
    });
    return found;
  };
  const place = (file, offset, at, nbytes, count) =>
    `${file}${offset === null ? "" : `, byte ${(offset + at).toLocaleString("en")}`}: ${nbytes.toLocaleString("en")} bytes`
    + (count > 1 ? ` of ${count} tensors` : "");
  const open = (number) => {
    chosen = number;
    const lines = [names[number], ...data.columns.map((_, c) => [columns[c + 1].textContent, cell(c, number)])
      .filter(([, value]) => value).map(([title, value]) => `${title}: ${value}`)];
    const found = places(number);
    const more = found.length > 40 ? [`and ${found.length - 40} more`] : [];
    const detail = byId("detail");
    detail.textContent = [...lines, ...(found.length ? ["", ...found.slice(0, 40), ...more] : [])].join("\n");
    detail.hidden = false;
    fill();
  };

  // Pictures: a box filters the table, a piece of a strip opens its tensor.
  byId("tree")?.addEventListener("click", (event) => {
    const box = event.target.closest("g[data-name]");
    if (!box) return;
    byId("filter").value = box.dataset.name;
    fill();
    table.scrollIntoView({ block: "nearest" });
  });
  const picture = byId("strips");
  const sum = (pieces) => pieces.reduce((total, value, i) => (i % 4 === 3 ? total + value : total), 0);
  const longest = Math.max(0, ...(data.cuts ?? []).map(sum));
  const hit = (event) => {
    const frame = picture.getBoundingClientRect();
    const number = Math.floor(((event.clientY - frame.top) / frame.height) * data.strips.length);
    const strip = data.strips[number];
    if (!strip) return null;
    const pieces = data.cuts[strip[2]];
    const aim = ((event.clientX - frame.left) / frame.width) * longest;
    for (let i = 0, at = 0; i < pieces.length; at += pieces[i + 3], i += 4) {
      if (aim < at + pieces[i + 3]) return { strip, at, first: pieces[i + 1], last: pieces[i + 2], nbytes: pieces[i + 3] };
    }
    return null;
  };
  picture?.addEventListener("mousemove", (event) => {
    const found = hit(event);
    if (!found) { byId("place").textContent = ""; return; }
    const { strip, at, first, last, nbytes } = found;
    const label = first < 0 ? "padding" : first === last ? names[data.rowOf[first]]
      : `${names[data.rowOf[first]]} to ${names[data.rowOf[last]]}`;
    byId("place").textContent = `${label} - ${place(strip[0], strip[1], at, nbytes, last - first + 1)}`;
  });
  picture?.addEventListener("click", (event) => {
    const found = hit(event);
    if (found && found.first >= 0) { byId("filter").value = ""; open(data.rowOf[found.first]); byId("detail").scrollIntoView({ block: "nearest" }); }
  });

  byId("controls").hidden = false;
  byId("filter").addEventListener("input", fill);
  fill();
})();
