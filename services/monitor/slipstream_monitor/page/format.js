// Numbers as people read them. A missing number is a dash.

const DASH = "–";
const missing = (value) => value === null || value === undefined || !Number.isFinite(value);

export function count(value) {
  return missing(value) ? DASH : Math.round(value).toLocaleString("en-US");
}

export function fixed(value, digits) {
  return missing(value) ? DASH : value.toFixed(digits);
}

// Without zeros at the end: 2, 0.25.
export function trimmed(value, digits = 3) {
  return missing(value) ? DASH : Number(value.toFixed(digits)).toLocaleString("en-US");
}

export function percent(value) {
  return missing(value) ? DASH : `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

export function si(value) {
  if (missing(value)) return DASH;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(1).replace("e-", "e−");
  return size < 1 ? Number(value.toPrecision(2)).toString() : Number(value.toPrecision(3)).toString();
}

export function bytes(value) {
  if (missing(value)) return DASH;
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log10(value) / 3));
  const scaled = value / 1000 ** power;
  return `${power === 0 || scaled >= 100 ? scaled.toFixed(0) : scaled.toFixed(scaled >= 10 ? 1 : 2)} ${units[power]}`;
}

export function milliseconds(value) {
  if (missing(value)) return DASH;
  if (value >= 1000) return `${(value / 1000).toFixed(1)} s`;
  return `${value.toFixed(value < 10 ? 1 : 0)} ms`;
}

export function seconds(value) {
  if (missing(value)) return DASH;
  return value < 1 ? milliseconds(value * 1000) : `${value.toFixed(value < 10 ? 1 : 0)} s`;
}

export function quantile(values, q) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const at = (sorted.length - 1) * q;
  const low = Math.floor(at);
  return sorted[low] + (sorted[Math.ceil(at)] - sorted[low]) * (at - low);
}
