// The law follows the sliders: the first, of what can be set, have a factor on each quantile at their
// positions; what the others change is added before.
for (const place of document.querySelectorAll(".sliders")) {
  const { levels, law, factors, changes } = JSON.parse(place.dataset.law);
  const inputs = [...place.querySelectorAll("input")];
  const [p50, p95] = place.querySelectorAll("dd output");
  const at = (quantiles, level) => quantiles[levels.indexOf(level)];

  function draw() {
    let last = 0;
    const places = inputs.map((input) => input.value);
    const factor = factors.reduce((all, values, k) => all * values[places[k]], 1);
    const moved = law.map((time, i) => {
      const added = changes.reduce((sum, rows, k) => sum + rows[places[factors.length + k]][i], time);
      return (last = Math.max(last, factor * added));
    });
    for (const input of inputs) {
      const name = JSON.parse(input.dataset.names)[input.value];
      input.closest("p").querySelector("output").textContent = name;
      input.setAttribute("aria-valuetext", name);
    }
    p50.textContent = `${at(moved, 0.5).toPrecision(5)} s`;
    p95.textContent = `${at(moved, 0.95).toPrecision(5)} s`;
    const low = Math.min(law[0], moved[0]), high = Math.max(law.at(-1), moved.at(-1));
    const x = (time) => 60 + (740 * (time - low)) / (high - low || 1);
    for (const [name, quantiles] of [["own", law], ["moved", moved]]) {
      const points = quantiles.map((t, i) => `${x(t).toFixed(1)},${(210 - 200 * levels[i]).toFixed(1)}`);
      place.querySelector(`path.${name}`).setAttribute("d", `M${points.join("L")}`);
      place.querySelector(`circle.${name}`).setAttribute("cx", x(at(quantiles, 0.95)).toFixed(1));
    }
    place.querySelectorAll("text[text-anchor]").forEach((tick, i) => {
      tick.textContent = `${(low + (i * (high - low)) / 2).toPrecision(4)} s`;
    });
  }

  place.addEventListener("input", draw);
  place.querySelector("button").addEventListener("click", () => {
    for (const input of inputs) input.value = input.defaultValue;
    draw();
  });
  draw();
}
