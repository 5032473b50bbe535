// Runs before the page is painted, so that a chosen theme does not flash in the other one's colours.
{
  let theme = null;
  try {
    theme = localStorage.getItem("orca-theme");
  } catch {
    // No storage: the system's theme.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
