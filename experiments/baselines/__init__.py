"""Multi-task learning beside what else there is for a table with groups: scikit-learn, mixed effects, boosting.

Three real tables: `school` (numbers), `landmine` (a rare class) and `har` (six activities), the last also with persons
who are not there in training. Every cell is one method on one random split: it chooses its hyperparameters by
cross-validation of the training part alone, where features are standardised within every fold, and is scored on the
rest, task by task. Packages that are not installed are named in the table.
"""
