"""From a desired state to ordered map writes: adopt, plan, admit, commit, retire."""
