import assert from "node:assert/strict";
import { test } from "node:test";

import { score } from "./arithmetic.js";

const cases: [string, number][] = [
  ["42", 1],
  [" 42\n", 1],
  ["The answer is 42.", 0.3],
  ["42 or 43", 0.3],
  ["41", 0.1],
  ["41 or 42", 0],
  ["142 apples", 0],
  ["no idea", 0],
  ["", 0],
];

for (const [text, expected] of cases) {
  test(`${JSON.stringify(text)} scores ${expected}`, () => assert.equal(score(text, "42"), expected));
}
