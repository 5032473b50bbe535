// The axis of time over all charts.

import { Chart } from "./chart.js";
import { moment } from "./format.js";

export class RulerChart extends Chart {
  frame(context) {
    const origin = this.model.origin ?? 0;
    const { step, times } = this.ticks();
    context.fillStyle = this.colours.quiet;
    context.textAlign = "left";
    for (const time of times) {
      const x = Math.round(this.x(origin + time)) + 5;
      const text = moment(time, step);
      if (x + context.measureText(text).width < this.right) context.fillText(text, x, this.height / 2);
    }
  }

  grid() {
    const { context } = this;
    const origin = this.model.origin ?? 0;
    context.fillStyle = this.colours.strongLine;
    for (const time of this.ticks().times) context.fillRect(Math.round(this.x(origin + time)), this.height - 7, 1, 7);
  }
}
