// The law follows the sliders: what each changes at its position is added to each quantile, and the
// first, of what can be set, multiply it.
for (const place of document.querySelectorAll(".sliders")) {
  const { levels, law, rows, factors } = JSON.parse(place.dataset.law);
  const inputs = [...place.querySelectorAll("input")];
  const [p50, p95] = place.querySelectorAll("dd output");
  const at = (quantiles, level) => quantiles[levels.indexOf(level)];

  function draw() {
    let last = 0;
    const moved = law.map((time, i) => {
      const values = inputs.map((input, k) => rows[k][input.value][i]);
      const added = values.slice(factors).reduce((sum, x) => sum + x, time);
      return (last = Math.max(last, values.slice(0, factors).reduce((all, x) => all * x, added)));
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
