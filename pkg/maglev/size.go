package maglev

// sizes are prime. Each is about three times the one before: tables of different
// sizes have nothing in common, so a backend more or less must seldom change the
// size.
var sizes = [...]int{67, 193, 577, 1733, 5189, 15559, 46663, 65521}

// fine is how many entries a backend has at least, as long as there is a size for
// it: a share is then exact within a sixteenth.
const fine = 16

// Size returns how many entries the table of so many backends has: one for one,
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
