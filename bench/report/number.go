package report

import (
	"math"
	"strconv"
	"strings"
)

// formatValue writes three or four digits that mean something: 41,240, 123,
// 12.3, 1.23, 0.123.
func formatValue(value float64) string {
	size := math.Abs(value)
	switch {
	case size >= 9999.5:
		unit := math.Pow10(int(math.Log10(size)) - 3)

		return groupThousands(math.Round(value/unit) * unit)
	case size >= 99.95:
		return groupThousands(value)
	case size >= 9.995:
		return strconv.FormatFloat(value, 'f', 1, 64)
	case size >= 0.9995 || size == 0:
		return strconv.FormatFloat(value, 'f', 2, 64)
	default:
		return strconv.FormatFloat(value, 'g', 3, 64)
	}
}

// groupThousands writes a whole number.
func groupThousands(value float64) string {
	text := strconv.FormatFloat(math.Abs(value), 'f', 0, 64)
	var groups []string
	for len(text) > 3 {
		groups = append([]string{text[len(text)-3:]}, groups...)
		text = text[:len(text)-3]
	}
	text = strings.Join(append([]string{text}, groups...), ",")
	if value < 0 {
		text = "-" + text
	}

	return text
}

// formatRatio writes two decimals, or three digits: 0.97, 1.04, 12.3, 154.
func formatRatio(ratio float64) string {
	switch {
	case ratio >= 99.95:
		return groupThousands(ratio)
	case ratio >= 9.995:
		return strconv.FormatFloat(ratio, 'f', 1, 64)
	case ratio > 0 && ratio < 0.0995:
		return strconv.FormatFloat(ratio, 'g', 2, 64)
	default:
		return strconv.FormatFloat(ratio, 'f', 2, 64)
	}
}

// formatRange writes the quartiles of ratios, unless there is only one ratio.
func formatRange(s Spread) string {
	if s.Rounds < 2 {
		return ""
	}

	return " (" + formatRatio(s.Low) + "–" + formatRatio(s.High) + ")"
}

// formatSpread writes the median of values, and half of what lies between their
// quartiles as a part of it.
func formatSpread(s Spread) string {
	text := formatValue(s.Median)
	if s.Rounds < 2 || s.Median == 0 {
		return text
	}
	percent := 100 * (s.High - s.Low) / 2 / math.Abs(s.Median)
	if percent < 9.95 {
		return text + " ±" + strconv.FormatFloat(percent, 'f', 1, 64) + " %"
	}

	return text + " ±" + strconv.FormatFloat(percent, 'f', 0, 64) + " %"
}
