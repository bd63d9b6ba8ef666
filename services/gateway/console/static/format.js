// Numbers as people read them. null and undefined become a dash: not known is not zero.

export const DASH = "–";

function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

export function count(value) {
  if (!known(value)) return DASH;
  if (Math.abs(value) < 10_000) return Math.round(value).toLocaleString("en");
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${(value / size).toFixed(Math.abs(value) >= 100 * size ? 0 : 1)}${unit}`;
  }
  return String(value);
}

/** Two significant digits: costs rest on assumptions. */
export function money(value, currency) {
  if (!known(value)) return DASH;
  const text = value === 0 ? "0" : Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en")
    : value.toLocaleString("en", { maximumSignificantDigits: 2, maximumFractionDigits: 12 });
  return `${text} ${currency}`;
}

export function percent(share) {
  if (!known(share)) return DASH;
  const value = share * 100;
  // 99.96 % is not all of it.
  if (value > 99 && value < 100) return `${(Math.floor(value * 10) / 10).toFixed(1)} %`;
  return `${value > 0 && value < 1 ? value.toFixed(1) : Math.round(value)} %`;
}

export function ms(value) {
  if (!known(value)) return DASH;
  if (value < 10) return `${value.toFixed(1)} ms`;
  if (value < 10_000) return `${Math.round(value).toLocaleString("en")} ms`;
  return `${(value / 1000).toFixed(1)} s`;
}

export function bytes(value) {
  if (!known(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${value.toFixed(at && value < 100 ? 1 : 0)} ${units[at]}`;
}

export function duration(seconds) {
  if (!known(seconds)) return DASH;
  const sign = seconds < 0 ? "-" : "";
  const s = Math.abs(seconds);
  if (s < 1) return `${sign}${Math.round(s * 1000)} ms`;
  if (s < 120) return `${sign}${s.toFixed(s < 10 ? 1 : 0)} s`;
  if (s < 7200) return `${sign}${Math.round(s / 60)} min`;
  if (s < 172_800) return `${sign}${(s / 3600).toFixed(1)} h`;
  return `${sign}${(s / 86_400).toFixed(1)} d`;
}

export function clock(unixS) {
  return known(unixS) ? new Date(unixS * 1000).toLocaleTimeString("en-GB") : DASH;
}

/** The day in UTC, as YYYY-MM-DD. */
export function day(unixS) {
  return known(unixS) ? new Date(unixS * 1000).toISOString().slice(0, 10) : DASH;
}

export function plural(number, one, many) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}
