"use strict";
// Fills every section.paged with a table out of the JSON in it: search, filters, sorting, 50 rows at a time.
(() => {
  const SIZE = 50;
  const MOST_CHOICES = 400; // of a filter; a column with more is searched instead
  const ORDER = new Intl.Collator("en", { numeric: true });

  const make = (tag, properties = {}, ...children) => {
    const found = Object.assign(document.createElement(tag), properties);
    found.append(...children);
    return found;
  };
  const said = (cell) => (Array.isArray(cell) ? cell[0] : cell ?? "");
  const WORDS = new Set(["pass", "fail", "error", "skip", "right", "wrong", "known", "unverified", "not_run",
    "agreed", "consistent", "relaxed", "scaled_down", "new", "unexpected", "passed", "failed"]);

  function filled(cell) {
    if (Array.isArray(cell)) return make("a", { href: cell[1], textContent: cell[0] });
    if (cell && cell.results) {
      return make("span", { className: "r" }, ...cell.results.flatMap(([verdict, reason, margin], place) => [
        ...(place ? [make("br")] : []),
        make("span", { className: `v ${verdict}`, textContent: verdict }), ` ${reason || (margin ?? "")}`]));
    }
    return WORDS.has(cell) ? make("span", { className: `v ${cell}`, textContent: cell }) : String(cell ?? "");
  }

  // Filters are the columns named as facets; of the overview also verdict and implementation, from column `results` on.
  function filterable(data) {
    const { columns, rows, results } = data;
    const texts = rows.map((row) => row.slice(0, results).map(said).join(" ").toLowerCase());
    const facets = data.facets.map((column) => [columns[column],
      [...new Set(rows.map((row) => String(said(row[column]))))].sort()]);
    if (results) {
      const verdicts = rows.flatMap((row) => row.slice(results).flatMap((cell) => cell ? cell.results : []));
      facets.push(["verdict", [...new Set(verdicts.map(([verdict]) => verdict))]]);
      facets.push(["implementation", columns.slice(results)]);
    }
    const has = (row, chosen) => row.slice(results).some((cell, place) => cell
      && (!chosen.implementation || columns[results + place] === chosen.implementation)
      && cell.results.some(([verdict]) => !chosen.verdict || verdict === chosen.verdict));
    return {
      columns, facets: facets.filter(([, values]) => values.length > 1 && values.length <= MOST_CHOICES),
      rows: (chosen, text) => rows.filter((row, place) => texts[place].includes(text)
        && data.facets.every((column) => !chosen[columns[column]] || String(said(row[column])) === chosen[columns[column]])
        && (!results || (!chosen.verdict && !chosen.implementation) || has(row, chosen))),
    };
  }

  function compare(column, down) {
    const key = (row) => (row[column] && row[column].results ? row[column].results[0][2] ?? -1 : said(row[column]));
    const sign = down ? -1 : 1;
    return (a, b) => {
      const [one, other] = [key(a), key(b)];
      if (typeof one === "number" && typeof other === "number") return sign * (one - other);
      return sign * ORDER.compare(String(one), String(other));
    };
  }

  function show(section) {
    const title = section.getAttribute("aria-label");
    const data = JSON.parse(section.querySelector("script").textContent);
    const source = filterable(data);
    const chosen = {};
    let [text, page, sorted, down] = ["", 0, null, false];

    const search = make("input", { type: "search", autocomplete: "off", spellcheck: false });
    const filters = make("form", { className: "filters" }, make("label", {}, "Search ", search));
    filters.setAttribute("role", "search");
    filters.setAttribute("aria-label", `Filter: ${title}`);
    filters.addEventListener("submit", (event) => event.preventDefault());
    const selects = source.facets.map(([name, values]) => {
      const select = make("select", {}, make("option", { value: "", textContent: "all" }),
        ...values.map((value) => make("option", { value, textContent: value || "none" })));
      select.setAttribute("aria-label", name); // the label's text holds all options
      select.addEventListener("change", () => { chosen[name] = select.value; page = 0; draw(); });
      filters.append(make("label", {}, `${name} `, select));
      return [name, select];
    });
    const status = make("p");
    status.setAttribute("role", "status");
    const body = make("tbody");
    const heads = source.columns.map((name, column) => {
      const button = make("button", { type: "button", textContent: name });
      const head = make("th", { scope: "col" }, button);
      button.addEventListener("click", () => {
        down = sorted === column ? !down : false;
        sorted = column;
        page = 0;
        draw();
      });
      return head;
    });
    const table = make("table", {}, make("caption", { textContent: title, className: "hidden" }),
      make("thead", {}, make("tr", {}, ...heads)), body);
    const scroll = make("div", { className: "scroll", tabIndex: 0 }, table);
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", title);
    const pager = make("nav", { className: "pager" });
    pager.setAttribute("aria-label", `Pages of ${title}`);
    const turn = (label, to) => {
      const button = make("button", { type: "button", textContent: label });
      button.addEventListener("click", () => { page = to(); draw(); });
      pager.append(button);
      return button;
    };
    let last = 0;
    const back = [turn("First", () => 0), turn("Previous", () => page - 1)];
    const forth = [turn("Next", () => page + 1), turn("Last", () => last)];

    function draw() {
      const rows = source.rows(chosen, text);
      if (sorted !== null) rows.sort(compare(sorted, down));
      last = Math.max(0, Math.ceil(rows.length / SIZE) - 1);
      page = Math.min(Math.max(page, 0), last);
      const shown = rows.slice(page * SIZE, (page + 1) * SIZE);
      body.replaceChildren(...shown.map((row) => make("tr", {}, ...row.map((cell, column) => {
        const found = make(column ? "td" : "th", {}, filled(cell));
        if (!column) found.scope = "row";
        if (typeof cell === "number") found.className = "n";
        return found;
      }))));
      const from = rows.length ? page * SIZE + 1 : 0;
      status.textContent = `${rows.length} rows; ${from} to ${from ? from + shown.length - 1 : 0} are shown`;
      heads.forEach((head, column) => head.setAttribute("aria-sort",
        column !== sorted ? "none" : down ? "descending" : "ascending"));
      back.forEach((button) => { button.disabled = page === 0; });
      forth.forEach((button) => { button.disabled = page === last; });
      selects.forEach(([name, select]) => { select.value = chosen[name] ?? ""; });
      search.value = search.value === "" ? text : search.value;
      remember();
    }

    // The choice stands in the address, so that a link can name it.
    function remember() {
      const found = new URLSearchParams(Object.entries({ ...chosen, q: text }).filter(([, value]) => value));
      const hash = found.toString();
      if (hash !== location.hash.slice(1)) history.replaceState(null, "", `#${hash}`);
    }
    function recall() {
      const given = new URLSearchParams(location.hash.slice(1));
      source.facets.forEach(([name]) => { chosen[name] = given.get(name) ?? ""; });
      text = (given.get("q") ?? "").toLowerCase();
      search.value = text;
      page = 0;
      draw();
    }
    search.addEventListener("input", () => { text = search.value.trim().toLowerCase(); page = 0; draw(); });
    addEventListener("hashchange", recall);
    section.append(filters, status, scroll, pager);
    recall();
  }

  document.querySelectorAll("section.paged").forEach(show);
})();
