// The reward itself: a pure function, so that equal requests get equal answers.

/** How well a completion answers a sum: 1 for the bare right number, less for what is only partly right. */
export function score(text: string, answer: string): number {
  const said = text.trim();
  if (said === answer) return 1;
  if (/\d+/.exec(said)?.[0] === answer) return 0.3;
  return /^\d+$/.test(said) ? 0.1 : 0;
}
