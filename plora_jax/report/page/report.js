// Sorting, linked highlighting, brushing and live news. The page is complete without it; it draws no figure of its own.
(() => {
  "use strict";
  const root = document.documentElement, $ = (id) => document.getElementById(id);
  const FIRST = 25;                                   // rows of the leaderboard shown at first
  let jobs = JSON.parse($("data").textContent).jobs;
  let marked = new Map();                             // job → the elements that show it
  let sorted = null, all = false, pinned = null;      // how the reader has arranged the page
  const kept = new Map();                             // axis name → [top, bottom] of its brush
  root.classList.add("has-js");

  // ---- light and dark
  const theme = $("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  const remembered = (value) => {
    try { if (value) localStorage.plora = value; return localStorage.plora; } catch { return value; }  // files may have none
  };
  const dark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const name = () => {
    const other = dark() ? "Light" : "Dark";
    theme.textContent = other;
    theme.setAttribute("aria-label", `${other} theme`);
  };
  if (["light", "dark"].includes(remembered())) root.dataset.theme = remembered();
  theme.hidden = false;
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    remembered(root.dataset.theme);
    name();
  });
  system.addEventListener("change", name);
  name();

  // ---- one job, wherever it is shown
  const tip = $("tip");
  let hot = null;
  const mark = (j, kind, on) => (marked.get(j) || []).forEach((element) => element.classList.toggle(kind, on));
  function light(j) {
    if (hot === j) return;
    if (hot !== null) mark(hot, "hot", false);
    hot = j;
    if (j !== null) mark(j, "hot", true);
    document.body.classList.toggle("some-hot", (hot ?? pinned) !== null);
  }
  function pin(j) {
    if (pinned !== null) { mark(pinned, "pin", false); }
    pinned = pinned === j ? null : j;
    if (pinned !== null) mark(pinned, "pin", true);
    document.body.classList.toggle("some-hot", (hot ?? pinned) !== null);
  }
  function show(j, event) {
    const job = jobs[j];
    const line = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
    const number = (value) => (value === null ? "–" : value.toFixed(3));
    const parts = [line("b", job.id)];
    const interval = job.low === null ? "" : ` (${number(job.low)} to ${number(job.high)})`;
    const scored = `score ${number(job.score)}${interval}, loss ${number(job.loss)}, `;
    parts.push(line("span", (job.score === null ? "" : scored) + job.status));
    parts.push(line("span", Object.entries(job.fields).map(([key, value]) => `${key} ${value}`).join(", ")));
    if (job.reason) parts.push(line("span", job.reason));
    tip.replaceChildren(...parts);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const x = Math.min(event.clientX + 16, innerWidth - box.width - 8), y = event.clientY + 18;
    tip.style.left = `${Math.max(x, 8)}px`;
    tip.style.top = `${y + box.height > innerHeight ? event.clientY - box.height - 12 : y}px`;
  }
  const away = () => { light(null); tip.hidden = true; };

  // ---- the nearest line under the pointer
  const place = (svg, event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const points = (d) => [...d.matchAll(/[ML]([-\d.]+) ([-\d.]+)/g)].map(([, x, y]) => [Number(x), Number(y)]);
  function near(svg) {
    const lines = [...svg.querySelectorAll(".line[data-j]")].map((line) => [Number(line.dataset.j), line, null]);
    return (event) => {
      const at = place(svg, event);
      let best = null, least = 14 * 14;
      for (const item of lines) {
        if (item[1].classList.contains("off")) continue;
        const list = item[2] ||= points(item[1].getAttribute("d"));
        for (let i = 0; i < list.length; i++) {
          const [ax, ay] = list[Math.max(i - 1, 0)], [bx, by] = list[i];
          if (at.x < ax - 14 || at.x > bx + 14) continue;
          const share = bx > ax ? Math.min(Math.max((at.x - ax) / (bx - ax), 0), 1) : 1;
          const dx = ax + share * (bx - ax) - at.x, dy = ay + share * (by - ay) - at.y, far = dx * dx + dy * dy;
          if (far < least) { least = far; best = item[0]; }
        }
      }
      return best;
    };
  }
  function follow(svg) {
    const find = near(svg);
    let waiting = false;
    svg.addEventListener("pointermove", (event) => {
      if (waiting || event.buttons) return;
      waiting = true;
      requestAnimationFrame(() => {
        waiting = false;
        const j = find(event);
        light(j);
        if (j === null) tip.hidden = true; else show(j, event);
      });
    });
    svg.addEventListener("pointerleave", away);
    svg.addEventListener("click", (event) => {
      const j = event.target.closest(".axis") ? null : find(event);
      if (j !== null) pin(j);
    });
  }

  // ---- the leaderboard: sort by any column, a few rows at first, arrow keys from row to row
  const value = (row, column) => {
    const cell = row.cells[column], text = cell.dataset.v || cell.textContent;
    const number = Number(text.replace(/,/g, ""));
    return text.trim() === "" || text === "–" ? null : Number.isNaN(number) ? text : number;
  };
  function sort(table, column, way) {
    sorted = [column, way];
    const body = table.tBodies[table.tBodies.length - 1], rows = [...body.rows];
    const keyed = rows.map((row) => [value(row, column), row]);
    keyed.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);            // what is missing stays last
      const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
      return way === "ascending" ? order : -order;
    });
    body.append(...keyed.map(([, row]) => row));
    [...table.tHead.rows[0].cells].forEach((cell, at) => {
      if (cell.dataset.sort !== undefined) cell.setAttribute("aria-sort", at === column ? way : "none");
    });
    few();
  }
  function few() {
    const table = $("board"), more = $("more");
    if (!table) return;
    const rows = [...table.tBodies[table.tBodies.length - 1].rows];
    const within = rows.filter((row) => !row.classList.contains("off"));
    rows.forEach((row) => row.classList.remove("far"));
    if (!all) within.slice(FIRST).forEach((row) => row.classList.add("far"));
    more.hidden = within.length <= FIRST;
    more.textContent = all ? `Show the first ${FIRST}` : `Show all ${within.length.toLocaleString("en")} jobs`;
    const told = `${within.length} of ${rows.length} jobs lie within the brushes below.`;
    $("shown").textContent = within.length < rows.length ? told : "";
    rows.forEach((row) => { row.tabIndex = -1; });
    if (within.length) within[0].tabIndex = 0;
  }
  function board() {
    const table = $("board");
    if (!table) return;
    [...table.tHead.rows[0].cells].forEach((cell, column) => {
      if (cell.dataset.sort === undefined) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...cell.childNodes);
      cell.append(button);
      cell.setAttribute("aria-sort", column === 0 ? "ascending" : "none");
      button.addEventListener("click", () => {
        const now = cell.getAttribute("aria-sort");
        sort(table, column, now === "ascending" ? "descending" : "ascending");
      });
    });
    const body = table.tBodies[table.tBodies.length - 1];
    const of = (event) => Number(event.target.closest("tr").dataset.j);
    body.addEventListener("pointerover", (event) => light(of(event)));
    body.addEventListener("pointerleave", away);
    body.addEventListener("focusin", (event) => light(of(event)));
    body.addEventListener("focusout", away);
    body.addEventListener("click", (event) => { if (!String(getSelection())) pin(of(event)); });
    body.addEventListener("keydown", (event) => {
      const row = event.target.closest("tr");
      if (event.key === "Enter" || event.key === " ") { pin(Number(row.dataset.j)); event.preventDefault(); return; }
      const side = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
      if (!side) return;
      let next = row[side];
      while (next && (next.classList.contains("off") || next.classList.contains("far"))) next = next[side];
      if (next) { row.tabIndex = -1; next.tabIndex = 0; next.focus(); }
      event.preventDefault();
    });
    $("more").addEventListener("click", () => { all = !all; few(); });
    if (sorted) sort(table, ...sorted); else few();
  }

  // ---- parallel coordinates: a brush an axis, by pointer or by keys
  function brushes(svg) {
    const NS = "http://www.w3.org/2000/svg", axes = [...svg.querySelectorAll(".axis")];
    const heights = (line) => points(line.getAttribute("d")).map(([, y]) => y);
    const lines = [...svg.querySelectorAll(".line")].map((line) => [Number(line.dataset.j), heights(line)]);
    const parts = [];
    function make(tag, values) {
      const made = document.createElementNS(NS, tag);
      for (const [key, one] of Object.entries(values)) made.setAttribute(key, one);
      return made;
    }
    function apply() {
      const on = parts.filter((part) => kept.has(part.name));
      for (const [j, ys] of lines) {
        const out = ({ name, at }) => ys[at] < kept.get(name)[0] - 0.05 || ys[at] > kept.get(name)[1] + 0.05;
        mark(j, "off", on.some(out));
      }
      const drawn = new Set(lines.map(([j]) => j));     // jobs without a line have no place within a brush
      for (let j = 0; j < jobs.length; j++) if (!drawn.has(j)) mark(j, "off", on.length > 0);
      $("clear").hidden = on.length === 0;
      few();
    }
    for (const [at, group] of axes.entries()) {
      const spine = group.querySelector(".spine").getAttribute("d").match(/M(\S+) (\S+)V(\S+)/).slice(1).map(Number);
      const [x, top, bottom] = spine, part = { at, name: group.dataset.name };
      const ticks = [...group.querySelectorAll(".tick")].map((tick) => [tick.getAttribute("y") - 4, tick.textContent]);
      const said = (y) => ticks.reduce((best, one) => (Math.abs(one[0] - y) < Math.abs(best[0] - y) ? one : best), [1e9, ""])[1];
      const band = make("rect", { class: "brush", x: x - 9, width: 18, y: top, height: 0 });
      const grab = make("rect", { class: "grab", x: x - 16, width: 32, y: top - 4, height: bottom - top + 8 });
      const handles = ["upper", "lower"].map((end) => make("path", {
        class: "handle", tabindex: 0, role: "slider", "aria-label": `${part.name}, ${end} end of the brush`,
        "aria-orientation": "vertical", "aria-valuemin": 0, "aria-valuemax": 100,
      }));
      group.append(band, grab, ...handles);
      const range = () => kept.get(part.name) || [top, bottom];
      function draw() {
        const [a, b] = range(), on = kept.has(part.name);
        band.setAttribute("y", a);
        band.setAttribute("height", on ? b - a : 0);
        handles.forEach((handle, end) => {
          const y = end ? b : a;
          handle.setAttribute("d", end ? `M${x - 6} ${y + 1}h12l-6 8z` : `M${x - 6} ${y - 1}h12l-6 -8z`);
          handle.setAttribute("aria-valuenow", Math.round((100 * (bottom - y)) / (bottom - top)));
          handle.setAttribute("aria-valuetext", `near ${said(y)}`);
        });
      }
      function set(a, b) {
        [a, b] = [Math.max(Math.min(a, b), top), Math.min(Math.max(a, b), bottom)];
        if (b - a >= bottom - top - 0.5) kept.delete(part.name); else kept.set(part.name, [a, b]);
        draw();
        apply();
      }
      const height = (event) => place(svg, event).y;
      const drag = (element, moved) => element.addEventListener("pointerdown", (event) => {
        const from = height(event), before = range();
        element.setPointerCapture(event.pointerId);
        const move = (next) => moved(from, height(next), before);
        const end = (last) => {
          element.removeEventListener("pointermove", move);
          if (element === grab && Math.abs(height(last) - from) < 3) set(top, bottom);
        };
        element.addEventListener("pointermove", move);
        element.addEventListener("pointerup", end, { once: true });
        event.preventDefault();
      });
      drag(grab, (from, to) => set(from, to));
      handles.forEach((handle, end) => {
        drag(handle, (from, to, [a, b]) => (end ? set(a, Math.max(to, a)) : set(Math.min(to, b), b)));
        handle.addEventListener("keydown", (event) => {
          const by = { ArrowUp: -1, ArrowDown: 1, PageUp: -5, PageDown: 5 }[event.key], [a, b] = range();
          const y = (end ? b : a) + ((by || 0) * (bottom - top)) / 20;
          if (by && end) set(a, Math.max(y, a));
          else if (by) set(Math.min(y, b), b);
          else if (event.key === "Home" || event.key === "Escape") set(top, bottom);
          else return;
          event.preventDefault();
        });
      });
      part.draw = draw;
      parts.push(part);
      draw();
    }
    const clear = () => { kept.clear(); parts.forEach((part) => part.draw()); apply(); };
    $("clear").addEventListener("click", clear);
    svg.addEventListener("keydown", (event) => { if (event.key === "Escape") clear(); });
    if (kept.size) apply();
  }

  // ---- bind what is on the page now; again after news
  function bind() {
    marked = new Map();
    document.querySelectorAll("[data-j]").forEach((element) => {
      const j = Number(element.dataset.j);
      if (!marked.has(j)) marked.set(j, []);
      marked.get(j).push(element);
    });
  }
  function bindPart(part) {
    if (part.querySelector("#board")) board();
    part.querySelectorAll(".curves, .parallel").forEach(follow);
    part.querySelectorAll(".parallel").forEach(brushes);
    part.querySelectorAll(".lanes").forEach((svg) => {
      const of = (event) => Number(event.target.closest("[data-j]")?.dataset.j ?? NaN);
      svg.addEventListener("pointerover", (event) => {
        const j = of(event);
        if (Number.isNaN(j)) { away(); return; }
        light(j);
        show(j, event);
      });
      svg.addEventListener("pointerleave", away);
      svg.addEventListener("click", (event) => { if (!Number.isNaN(of(event))) pin(of(event)); });
    });
  }
  bind();
  document.querySelectorAll("[data-part]").forEach(bindPart);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (pinned !== null) pin(pinned);
    away();
  });

  // ---- live: ask this page's own server whether something changed, and take over the sections that did
  if (document.body.dataset.live) {
    let seen = document.body.dataset.live;
    const ask = async () => {
      try {
        const answer = await fetch(`state.json?seen=${encodeURIComponent(seen)}`, { cache: "no-store" });
        const news = await answer.json();
        if (news.page) {
          seen = news.version;
          const next = new DOMParser().parseFromString(news.page, "text/html");
          const held = pinned === null ? null : jobs[pinned].id;
          if (pinned !== null) pin(pinned);
          away();
          jobs = JSON.parse(next.getElementById("data").textContent).jobs;
          const changed = [];
          for (const part of next.querySelectorAll("[data-part]")) {
            const here = document.querySelector(`[data-part="${part.dataset.part}"]`);
            if (!here) { document.querySelector("main").append(part); changed.push(part); }
            else if (here.dataset.was !== part.innerHTML) {
              here.dataset.was = part.innerHTML;
              here.replaceChildren(...part.childNodes);
              changed.push(here);
            }
          }
          bind();
          changed.forEach(bindPart);
          const at = jobs.findIndex((job) => job.id === held);
          if (at >= 0) pin(at);
        }
        root.classList.remove("lost");
      } catch { root.classList.add("lost"); }
      setTimeout(ask, 2000);
    };
    setTimeout(ask, 2000);
  }
})();
