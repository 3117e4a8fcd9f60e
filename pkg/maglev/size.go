package maglev

// sizes are prime. Each is about three times the one before, so that the number of backends
// seldom changes the size: tables of different sizes have nothing in common.
var sizes = [...]int{67, 193, 577, 1733, 5189, 15559, 46663, 65521}

// fine is the least number of entries per backend, as long as there is a size for it. The
// share of a backend is then exact to a sixteenth.
const fine = 16

// Size returns the number of entries in the table of so many backends: one for one,
// else the first of 67, 193, 577, 1733, 5189, 15559, 46663 and 65521 that has 16 for
// each backend, or the last of these.
func Size(backends int) int {
	if backends <= 1 {
		return max(backends, 0)
	}
	for _, size := range sizes {
		if size >= fine*backends {
			return size
		}
	}

	return sizes[len(sizes)-1]
}
