"use strict";
(() => {
  const main = document.getElementById("main");
  const root = document.documentElement;

  // Light or dark: as the system has it until somebody chooses.
  const theme = document.getElementById("theme");
  theme.addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  // One line through everything that shares the axis of time, and the values there.
  const pointsOf = (plot) => plot.dataset.points.split(";").map((p) => p.split(","));
  function read(plot, share) {
    const points = pointsOf(plot);
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (Number(points[middle][0]) < share) low = middle + 1; else high = middle;
    }
    const before = Math.max(0, low - 1);
    const near = share - points[before][0] < points[low][0] - share ? before : low;
    const output = plot.closest(".curve").querySelector("output");
    output.innerHTML = `${points[near][2]} <small>at step ${points[near][1]}</small>`;
    return near;
  }
  function pointAt(share) {
    main.style.setProperty("--x", `${share}%`);
    main.style.setProperty("--shown", "block");
    for (const plot of main.querySelectorAll(".plot[data-points]")) read(plot, share);
  }
  main.addEventListener("pointermove", (event) => {
    const track = event.target.closest(".track");
    if (!track) return;
    const box = track.getBoundingClientRect();
    pointAt((100 * (event.clientX - box.left)) / box.width);
  });
  main.addEventListener("pointerleave", () => main.style.setProperty("--shown", "none"));
  main.addEventListener("keydown", (event) => {
    const plot = event.target.closest(".plot[data-points]");
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: 20, PageDown: -20, Home: -1e6, End: 1e6 }[event.key];
    if (!plot || !by) return;
    event.preventDefault();
    const points = pointsOf(plot);
    const at = Number(plot.dataset.at ?? points.length - 1) + by;
    plot.dataset.at = Math.min(points.length - 1, Math.max(0, at));
    pointAt(Number(points[plot.dataset.at][0]));
  });

  // A page that is served: sections come whole and replace what was there, so nothing piles up.
  if (!main.dataset.stream) return;
  const pulse = document.getElementById("pulse");
  function put(name, html) {
    const place = document.getElementById(`s-${name}`);
    if (!place) return;
    const open = [...place.querySelectorAll("details[open]")].map((d) => d.id);
    const scrolled = [...place.querySelectorAll(".scroll,.lanes,.log")].map((e) => [e.scrollLeft, e.scrollTop]);
    const focused = place.contains(document.activeElement) ? document.activeElement : null;
    const mark = focused && (focused.closest("[id]")?.id || "");
    const index = focused && [...place.querySelectorAll("[tabindex],a,summary")].indexOf(focused);
    place.innerHTML = html;
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    place.querySelectorAll(".scroll,.lanes,.log").forEach((e, n) => {
      if (scrolled[n]) [e.scrollLeft, e.scrollTop] = scrolled[n];
    });
    if (focused) {
      const named = mark && mark !== place.id ? document.getElementById(mark)?.querySelector("summary") : null;
      (named || [...place.querySelectorAll("[tabindex],a,summary")][index])?.focus({ preventScroll: true });
    }
  }
  const source = new EventSource(main.dataset.stream);
  source.onopen = () => { pulse.className = "on"; pulse.textContent = "live"; };
  source.onerror = () => { pulse.className = ""; pulse.textContent = "not connected"; };
  source.onmessage = (event) => {
    for (const [name, html] of Object.entries(JSON.parse(event.data))) put(name, html);
  };
  source.addEventListener("over", () => { source.close(); pulse.className = ""; pulse.textContent = "the run is over"; });
})();
