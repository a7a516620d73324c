/** Dates as `strftime` of C writes them, in English: chat templates tell the target the date. */

const DAYS = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS = [
  ...["January", "February", "March", "April", "May", "June"],
  ...["July", "August", "September", "October", "November", "December"],
];

/** Return a date in local time; directives that are not known stay as they are. */
export function strftime(date: Date, format: string): string {
  const two = (number: number): string => String(number).padStart(2, "0");
  const [day, month, hour] = [DAYS[date.getDay()]!, MONTHS[date.getMonth()]!, date.getHours()];
  const written: { readonly [directive: string]: string } = {
    Y: String(date.getFullYear()),
    y: two(date.getFullYear() % 100),
    m: two(date.getMonth() + 1),
    d: two(date.getDate()),
    H: two(hour),
    I: two(hour % 12 || 12),
    M: two(date.getMinutes()),
    S: two(date.getSeconds()),
    p: hour < 12 ? "AM" : "PM",
    A: day,
    a: day.slice(0, 3),
    B: month,
    b: month.slice(0, 3),
    "%": "%",
  };
  return format.replace(/%(.)/g, (directive, letter: string) => written[letter] ?? directive);
}
