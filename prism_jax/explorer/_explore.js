// Controls of a job, and what follows from them. `ask` sends a question and resolves to its answer:
// the step without variability follows each move, the law once the hand rests.
"use strict";
const REST_MS = 150;

function explore(root, ask) {
  const place = element("div", { class: "explore" });
  root.append(place);
  const settings = {};
  let moves = 0, timer, levels, shown, own, ownLaw, simulating = false;
  const answered = (what, of) => ask({ what, settings: of }).catch(() =>
    ({ refused: "There is no answer any more: run the command or the cell again, and open its page." }));

  function element(name, attributes = {}, ...content) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...content);
    return made;
  }

  const form = element("form", { "aria-label": "controls" });
  const status = element("p", { role: "status" });
  const step = element("section", { "aria-label": "step" });
  const law = element("section", { "aria-label": "law", "aria-live": "polite" });
  const price = element("input", { type: "number", min: 0, step: 0.1, value: 2, id: "explore-price" });
  const money = element("p", {}, element("label", { for: "explore-price" }, "price of a GPU hour "), price);
  price.style.width = "6rem";
  place.append(form, element("div", {}, status, step, money, law));

  function controlOf({ name, values, own: ofJob }, number) {
    const id = `explore-${number}`;
    const ranged = values.length > 2 && values.every((value) => value !== "" && isFinite(value));
    const output = element("output", { for: id }, ofJob);
    const input = ranged
      ? element("input", { type: "range", id, min: 0, max: values.length - 1, value: values.indexOf(ofJob) })
      : element("select", { id }, ...values.map((value) => element("option", value === ofJob ? { selected: "" } : {}, value)));
    const row = element("div", { class: "control" }, element("label", { for: id }, name), input);
    if (ranged) row.append(output);
    input.addEventListener("input", () => {
      const value = ranged ? values[input.value] : input.value;
      if (value === ofJob) delete settings[name];
      else settings[name] = value;
      output.textContent = value;
      if (ranged) input.setAttribute("aria-valuetext", value);
      row.classList.toggle("moved", value !== ofJob);
      follow();
    });
    form.addEventListener("reset", () => {
      delete settings[name];
      input.removeAttribute("aria-valuetext");
      output.textContent = ofJob;
      row.classList.remove("moved");
    });
    return row;
  }

  const tile = (name, value) => element("div", {}, element("dt", {}, name), element("dd", {}, value));

  function bar(name, share, text, bad = false) {
    const filled = element("i");
    filled.style.width = `${100 * Math.min(share, 1)}%`;
    return element("div", { class: bad ? "bar bad" : "bar" },
      element("span", {}, name), element("span", {}, filled), element("span", {}, text));
  }

  function showStep(of) {
    shown = of;
    const seconds = (x) => `${x.toPrecision(4)} s`;
    const change = 100 * (of.step_s / own.step_s - 1);
    const parts = Object.entries(of.breakdown_s).sort((a, b) => b[1] - a[1]);
    const cost = `${(of.gpu_hours * price.value).toPrecision(4)} (${of.gpu_hours.toPrecision(4)} GPU hours)`;
    step.replaceChildren(
      element("dl", {},
        tile("step without variability", seconds(of.step_s)),
        tile("against the job as it is", `${change >= 0 ? "+" : ""}${change.toFixed(1)} %`),
        tile("90 % of such runs", of.interval_s.map((x) => x.toPrecision(4)).join(" .. ") + " s"),
        tile("each GPU", of.rate), tile("MFU", of.mfu === null ? "not known" : `${(100 * of.mfu).toFixed(1)} %`),
        tile(`cost of a ${of.gpu_hours_of}`, cost)),
      bar(of.fits ? "memory" : "memory: does not fit", of.memory_gib / of.usable_gib,
        `${of.memory_gib.toFixed(1)} of ${of.usable_gib.toFixed(1)} GiB`, !of.fits),
      ...parts.filter(([, x]) => x > 5e-4 * of.step_s)
        .map(([name, x]) => bar(name, x / of.step_s, `${seconds(x)}, ${((100 * x) / of.step_s).toFixed(1)} %`)),
      element("p", { class: "faint" }, `90 % of such runs: ${of.error}.`));
    say(of.header);
  }

  // What was refused leaves nothing that could be taken for its answer.
  function say(text, bad = false) {
    status.textContent = text;
    status.className = bad ? "bad" : "";
    if (bad) law.setAttribute("aria-busy", "false");
    for (const section of [step, law]) section.hidden = bad;
  }

  function showLaw(of, ofJob) {
    const [first, last] = [ofJob, of].map((x) => x.quantiles_s).reduce(
      ([low, high], q) => [Math.min(low, q[0]), Math.max(high, q.at(-1))], [Infinity, 0]);
    const x = (time) => 60 + (640 * (time - first)) / (last - first || 1);
    const line = (of, name) => {
      const points = of.quantiles_s.map((t, i) => `${x(t).toFixed(1)},${(210 - 200 * levels[i]).toFixed(1)}`);
      return `<path class="${name}" d="M${points.join("L")}"/>`;
    };
    const ticks = [0, 0.5, 1].map((t) => `<text x="${60 + 640 * t}" y="238" text-anchor="${["start", "middle", "end"][2 * t]}">` +
      `${(first + t * (last - first)).toPrecision(4)} s</text>`);
    const shares = [0, 0.5, 1].map((s) => `<text x="0" y="${214 - 200 * s}">${100 * s} %</text>`);
    const figure = element("figure", { style: "margin: 0" });
    figure.innerHTML = `<svg role="img" viewBox="0 0 710 250" aria-label="share of steps done by a time">` +
      line(ofJob, "own") + line(of, "moved") + ticks.join("") + shares.join("") + "</svg>";
    law.replaceChildren(
      element("dl", {}, ...["mean", "p50", "p95", "p99"].map((name) => tile(name, `${of[name].toPrecision(5)} s`))),
      figure, element("p", { class: "faint" }, "Share of steps done by a time: the job as it is (grey), and as set."));
  }

  // The step of the last move is shown, and once the hand rests its law.
  async function follow() {
    const move = ++moves, asked = performance.now();
    clearTimeout(timer);
    law.setAttribute("aria-busy", "true");
    const answer = await answered("step", settings);
    if (move !== moves) return;
    place.dataset.step = `${move} ${performance.now() - asked}`;
    if (answer.refused) {
      say(answer.refused, true);
      return;
    }
    showStep(answer);
    timer = setTimeout(simulate, move > 1 ? REST_MS : 0);
  }

  // One law at a time; those of moves that came meanwhile but the last are not asked for.
  async function simulate() {
    if (simulating) return;
    simulating = true;
    for (let done = 0; done !== moves; ) {
      const move = moves, began = performance.now();
      const moved = Object.keys(settings).length > 0;
      ownLaw ??= await answered("law", {});
      const answer = moved ? await answered("law", { ...settings }) : ownLaw;
      done = move;
      if (move !== moves) continue;
      if (answer.refused) say(answer.refused, true);
      else showLaw(answer, ownLaw.refused ? answer : ownLaw);
      law.setAttribute("aria-busy", "false");
      place.dataset.law = `${move} ${performance.now() - began}`;
    }
    simulating = false;
  }

  Promise.all([answered("controls", {}), answered("step", {})]).then(([answer, ofJob]) => {
    if (answer.refused || ofJob.refused) {
      say(answer.refused ?? ofJob.refused, true);
      return;
    }
    levels = answer.levels;
    own = ofJob;
    for (const group of new Set(answer.controls.map((control) => control.group))) {
      const rows = answer.controls.map((control, i) => [control, i]).filter(([control]) => control.group === group);
      form.append(element("fieldset", {}, element("legend", {}, group), ...rows.map((row) => controlOf(...row))));
    }
    form.append(element("button", { type: "reset" }, "as the job is"));
    form.addEventListener("reset", follow);
    form.addEventListener("submit", (event) => event.preventDefault());
    price.addEventListener("input", () => shown && showStep(shown));
    follow();
  });
}
