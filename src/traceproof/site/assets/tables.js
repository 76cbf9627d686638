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
      return make("span", { className: "r" }, ...cell.results.flatMap((one, place) => [
        ...(place ? [make("br")] : []),
        make("span", { className: `v ${one.verdict}`, textContent: one.verdict }), ` ${one.more}`]));
    }
    return WORDS.has(cell) ? make("span", { className: `v ${cell}`, textContent: cell }) : String(cell ?? "");
  }

  // A table of rows that are there: filters are the columns named as facets.
  function plain(data) {
    const texts = data.rows.map((row) => row.map(said).join(" ").toLowerCase());
    const facets = data.facets.map((column) => [data.columns[column],
      [...new Set(data.rows.map((row) => String(said(row[column]))))].sort()])
      .filter(([, values]) => values.length > 1 && values.length <= MOST_CHOICES);
    return {
      columns: data.columns, facets,
      rows: (chosen, text) => data.rows.filter((row, place) => texts[place].includes(text)
        && facets.every(([name]) => !chosen[name] || String(said(row[data.columns.indexOf(name)])) === chosen[name])),
    };
  }

  // The overview: a row per definition, a column per implementation.
  function matrix(data) {
    const used = [...new Set(data.results.map((one) => one[1]))].sort((a, b) => a - b);
    const of = data.definitions.map(() => []);
    data.results.forEach((one) => of[one[0]].push(one));
    const facets = [["op_type", data.op_types], ["outcome", data.outcomes], ["verdict", data.verdicts],
      ["implementation", used.map((place) => data.implementations[place])]];
    const cell = (results) => (results.length ? { results: results.map(([, , verdict, reason, margin]) => (
      { verdict: data.verdicts[verdict], more: data.reasons[reason] || (margin ?? "") })),
      sort: results[0][4] ?? -1 - results[0][2] } : "");
    const rows = (chosen, text) => {
      const wanted = (one) => (!chosen.verdict || data.verdicts[one[2]] === chosen.verdict)
        && (!chosen.implementation || data.implementations[one[1]] === chosen.implementation);
      const found = [];
      data.definitions.forEach(([name, op, outcome, slug], place) => {
        if (!`${name} ${data.op_types[op]}`.toLowerCase().includes(text)) return;
        if (chosen.op_type && data.op_types[op] !== chosen.op_type) return;
        if (chosen.outcome && data.outcomes[outcome] !== chosen.outcome) return;
        if ((chosen.verdict || chosen.implementation) && !of[place].some(wanted)) return;
        found.push([[name, `definitions/${slug ?? name}.html`], data.op_types[op], data.outcomes[outcome],
          ...used.map((implementation) => cell(of[place].filter((one) => one[1] === implementation)))]);
      });
      return found;
    };
    return { columns: ["definition", "op_type", "outcome", ...used.map((place) => data.implementations[place])],
      facets, rows };
  }

  function compare(column, down) {
    const key = (row) => (row[column] && row[column].results ? row[column].sort : said(row[column]));
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
    const source = data.definitions ? matrix(data) : plain(data);
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
